"""/v1/files and /v1/batches: OpenAI's client, owners, limits, hostile uploads, full disks, restarts."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from starlette.types import Message

from paceline.config import ServerConfig
from paceline.core.outputs import RequestOutput
from paceline.engine.engine import Engine
from paceline.errors import ParameterError
from paceline.server import limits
from paceline.server.batch.documents import BatchCounts, BatchFault, BatchFaults, BatchObject, StoredBatch
from paceline.server.batch.runner import BATCH_PRIORITY, BatchRunner
from paceline.server.batch.store import BatchStore, new_id
from paceline.server.errors import ApiError
from paceline.server.security import UploadReceiver
from paceline.server.structures import AnswerForm
from polling import PATIENCE, wait_until
from served import Served
from server.batch.test_forms import FORM, GOOD
from server_support import Live, start
from web import client

pytestmark = pytest.mark.usefixtures("one_thread")

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MAX_UPLOAD = 2**20
ENDED = ("completed", "failed", "cancelled", "expired")


def line(name: str, text: str = "hello", url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    body = {"model": "tiny", "max_tokens": 4} | body
    given = {"prompt": text} if url == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    return {"custom_id": name, "method": "POST", "url": url, "body": given | body}


def jsonl(lines: list[Any]) -> bytes:
    return b"\n".join(each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines)


def official(url: str, key: str = "none") -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=key, http_client=client, max_retries=0)


def upload(api: OpenAI, lines: list[Any], name: str = "in.jsonl") -> str:
    return api.files.create(file=(name, jsonl(lines)), purpose="batch").id


def begin(api: OpenAI, lines: list[Any], endpoint: Any = COMPLETIONS, **more: Any) -> Any:
    more = {"extra_body": {"seed": 7}} | more
    return api.batches.create(
        input_file_id=upload(api, lines), endpoint=endpoint, completion_window="24h", metadata={"who": "me"}, **more
    )


def ended(api: OpenAI, name: str) -> Any:
    wait_until(lambda: api.batches.retrieve(name).status in ENDED)
    return api.batches.retrieve(name)


def content(api: OpenAI, name: str | None) -> dict[str, dict[str, Any]]:
    """Output lines by custom_id, which must be unique."""
    if name is None:
        return {}
    lines = [json.loads(text) for text in api.files.content(name).text.splitlines()]
    found = {each["custom_id"]: each for each in lines}
    assert len(found) == len(lines)
    return found


def texts(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: each["response"]["body"]["choices"][0]["text"] for name, each in found.items()}


@pytest.fixture(scope="module")
def live(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    path = tmp_path_factory.mktemp("batches")
    sizes = {"max_body_bytes": 2**16, "max_upload_bytes": MAX_UPLOAD}
    config = ServerConfig(port=0, served_model_name="tiny", max_waiting=12, batch_dir=str(path), **sizes)  # type: ignore[arg-type]
    yield from start(config, tiny)


@pytest.fixture(scope="module")
def keyed(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    path = tmp_path_factory.mktemp("keyed")
    yield from start(
        ServerConfig(port=0, served_model_name="tiny", api_keys=("one", "two", "three"), batch_dir=str(path)), tiny
    )


def test_a_batch_from_upload_to_output(live: Live) -> None:
    api = official(live.url)
    lines = [line(str(number), f"text {number}") for number in range(20)] + [line("bad", top_p=2)]
    batch = begin(api, lines)
    assert (batch.object, batch.endpoint, batch.metadata) == ("batch", COMPLETIONS, {"who": "me"})
    batch = ended(api, batch.id)
    assert (batch.status, batch.errors) == ("completed", None)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (21, 20, 1)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    good, bad = content(api, batch.output_file_id), content(api, batch.error_file_id)
    assert sorted(good, key=int) == [str(number) for number in range(20)]
    assert bad["bad"]["response"]["status_code"] == 400
    assert api.batches.list().data[0].id == batch.id
    kept = api.files.retrieve(batch.output_file_id)
    assert (kept.purpose, kept.bytes) == ("batch_output", len(api.files.content(kept.id).content))
    again = ended(api, begin(api, lines[3:5]).id)
    assert texts(content(api, again.output_file_id)) == {name: texts(good)[name] for name in "34"}


def test_a_batch_of_chats(live: Live) -> None:
    api = official(live.url)
    batch = ended(api, begin(api, [line("a", url=CHATS, n=2)], CHATS).id)
    assert len(content(api, batch.output_file_id)["a"]["response"]["body"]["choices"]) == 2


def test_a_deadline_of_a_line_does_not_count_while_its_structure_compiles(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts from the line's row. Without its structure the line would have got any text."""
    pytest.importorskip("llguidance", reason="structured outputs need the extra 'structured'")
    usual, api = AnswerForm.compile, official(live.url)
    monkeypatch.setattr(AnswerForm, "compile", lambda *given: (time.sleep(0.6), usual(*given))[1])
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}}
    asked = line("a", url=CHATS, response_format=form, deadline_ms=500, max_tokens=8)
    found = content(api, ended(api, begin(api, [asked], CHATS).id).output_file_id)
    assert found["a"]["response"]["body"]["choices"][0]["message"]["content"] in ("true", "false")


def test_files_are_listed_by_age_and_deleted(live: Live) -> None:
    api = official(live.url)
    names = [upload(api, [line(str(number))]) for number in range(3)]
    assert [file.id for file in api.files.list(limit=3).data] == names[::-1]
    assert [file.id for file in api.files.list(limit=2, after=names[2]).data] == [names[1], names[0]]
    assert {file.purpose for file in api.files.list(purpose="batch_output")} <= {"batch_output"}
    assert api.files.delete(names[0]).deleted
    for ask in (api.files.retrieve, api.files.content, api.files.delete):
        with pytest.raises(openai.NotFoundError, match=r"there is no file .*; GET /v1/files lists them"):
            ask(names[0])
    assert live.get("/v1/files?limit=0").status_code == 400
    assert live.get("/v1/files?colour=red").status_code == 400
    assert live.get("/v1/files?after=nothing").status_code == 400


BAD_FILES: dict[str, tuple[list[Any], str, int | None]] = {
    "nothing": ([b"\n\n"], "no lines", None),
    "no JSON": ([line("a"), b"{"], "not valid JSON", 2),
    "twice": ([line("a"), line("a")], "an earlier line has the custom_id 'a'", 2),
    "another endpoint": ([line("a", url=CHATS)], "the batch is for /v1/completions", 1),
    "plain": ([{"prompt": "x"}], "custom_id: Field required", 1),
    "no text": ([b"\xff\xfe"], "not valid JSON", 1),
    "deep": ([b"[" * 3000], "", 1),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_an_invalid_file_fails_and_names_the_line(live: Live, kind: str) -> None:
    lines, why, where = BAD_FILES[kind]
    api = official(live.url)
    batch = ended(api, begin(api, lines).id)
    assert (batch.status, batch.output_file_id) == ("failed", None)
    assert why in batch.errors.data[0].message
    assert batch.errors.data[0].line == where


def test_unsupported_values_are_refused_by_name(live: Live) -> None:
    api = official(live.url)
    good = upload(api, [line("a")])
    with pytest.raises(openai.BadRequestError, match="completion_window"):
        api.batches.create(input_file_id=good, endpoint=COMPLETIONS, completion_window="1h")  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        api.batches.create(input_file_id=good, endpoint="/v1/embeddings", completion_window="24h")
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        api.batches.create(input_file_id="file-" + "0" * 24, endpoint=COMPLETIONS, completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="purpose"):
        api.files.create(file=("x", b"x"), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match="expires_after"):
        api.files.create(file=("x", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
    with pytest.raises(openai.APIStatusError) as error:
        api.files.create(file=("x", b"x" * MAX_UPLOAD), purpose="batch")
    assert error.value.status_code == 413


NAMES = ["../../etc/passwd", "/etc/passwd", "..", ".", "", "a\x00b", "a\r\nX: y", "é\u2028", "x" * 5000]


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_file_name_is_only_a_label(live: Live, name: str) -> None:
    before = sorted(Path(str(live.context.config.batch_dir)).rglob("*"))
    form = {"file": (name, b"x"), "purpose": (None, "batch")}
    reply = client.post(f"{live.url}/v1/files", files=form)
    assert reply.status_code in (200, 400)
    after = set(Path(str(live.context.config.batch_dir)).rglob("*")) - set(before)
    if reply.status_code == 200:
        kept = reply.json()
        assert sorted(path.name for path in after) == [f"{kept['id']}.data", f"{kept['id']}.json"]
        assert not set(kept["filename"]) & set("/\\\r\n\0")
        sent = client.get(f"{live.url}/v1/files/{kept['id']}/content")
        assert sent.content == b"x"
        assert sent.headers["x-content-type-options"] == "nosniff"
    else:
        assert not after


@pytest.mark.parametrize(
    "name", ["../lock", "..%2flock", "%2e%2e/lock", "file-", "file-" + "g" * 24, "x" * 3000, "%00"]
)
def test_a_hostile_id_is_not_found(live: Live, name: str) -> None:
    for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}"):
        assert client.get(live.url + path).status_code == 404
    assert client.delete(f"{live.url}/v1/files/{name}").status_code in (404, 405)


def files_in(live: Live) -> set[str]:
    return {path.name for path in (Path(str(live.context.config.batch_dir)) / "files").iterdir()}


def test_a_file_may_be_larger_than_a_json_body(live: Live) -> None:
    api = official(live.url)
    lines = [line(str(number), "x" * 300) for number in range(500)]
    assert len(jsonl(lines)) > 2 * live.context.config.max_body_bytes
    before = files_in(live)
    name = upload(api, lines)
    assert api.files.content(name).content == jsonl(lines)
    assert files_in(live) - before == {f"{name}.data", f"{name}.json"}
    api.files.delete(name)


def test_an_upload_of_unknown_length_stops_at_the_limit_and_leaves_nothing(live: Live) -> None:
    before = files_in(live)

    def pieces() -> Iterator[bytes]:
        yield GOOD[: GOOD.index(b"x\r\n")]
        for _ in range(2 * MAX_UPLOAD // 2**14):
            yield b"x" * 2**14

    with suppress(httpx.TransportError):  # the client may still be sending when it is refused
        assert client.post(f"{live.url}/v1/files", content=pieces(), headers={"Content-Type": FORM}).status_code == 413
    wait_until(lambda: files_in(live) == before)


def test_an_upload_whose_client_disconnects_leaves_nothing(live: Live) -> None:
    before = files_in(live)
    host, port = live.url.removeprefix("http://").split(":")
    head = f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: {FORM}\r\nContent-Length: 900000\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as made:
        made.sendall(head.encode() + GOOD[: GOOD.index(b"x\r\n")] + b"x" * 2**18)
        wait_until(lambda: files_in(live) - before)
    wait_until(lambda: files_in(live) == before)


def test_uploads_in_progress_count_towards_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_FILES_BYTES", 150)
    store = BatchStore(tmp_path)

    async def receive() -> None:
        async with store.receive_file("one") as first, store.receive_file("one") as second:
            await first.take(first.write, b"x" * 100)
            with pytest.raises(ApiError, match="delete some"):
                await second.take(second.write, b"x" * 100)
            async with store.receive_file("two") as other:
                await other.take(other.write, b"x" * 100)
            await first.keep("first")

    asyncio.run(receive())
    store.close()
    assert [kept.document.bytes for kept in store.files.values()] == [100]
    assert len(list((tmp_path / "files").iterdir())) == 2, "its content and its document"


def test_concurrent_uploads_count_towards_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_FILES", 2)
    store, all_tried = BatchStore(tmp_path), asyncio.Barrier(5)

    async def receive() -> bool:
        try:
            async with store.receive_file("one"):
                await all_tried.wait()
                return True
        except ApiError:
            await all_tried.wait()
            return False

    async def begin() -> list[bool]:
        return await asyncio.gather(*(receive() for _ in range(5)))

    assert asyncio.run(begin()).count(True) == 2
    store.close()


def test_an_uploads_timeout_grows_with_its_length(live: Live) -> None:
    config = replace(live.context.config, body_timeout=0.05, max_upload_bytes=2**30)
    left: list[Message] = [{"type": "http.request", "body": b"x" * 2**18, "more_body": True}] * 2  # 0.45 s in all

    async def receive() -> Message:
        if left:
            return left.pop()
        await asyncio.sleep(0.1 if len(waited) == 0 else PATIENCE)
        waited.append(1)
        return {"type": "http.request", "body": b"", "more_body": True}

    async def read() -> None:
        waiting = UploadReceiver(config, receive)
        for _ in range(3):
            await waiting.next_message()
        with pytest.raises(ApiError, match="did not arrive") as refusal:
            await waiting.next_message()
        assert refusal.value.status == 408

    waited: list[int] = []
    asyncio.run(read())
    assert waited == [1]


def test_pages_of_other_sites_cannot_upload(live: Live) -> None:
    form = {"file": ("f", b"x"), "purpose": (None, "batch")}

    def status(origin: str) -> int:
        return client.post(f"{live.url}/v1/files", files=form, headers={"Origin": origin}).status_code

    assert status("https://elsewhere.example") == status("null") == 403
    assert status(live.url) == 200


def test_owners_see_only_their_own_files_and_batches(keyed: Live) -> None:
    one, two = official(keyed.url, "one"), official(keyed.url, "two")
    batch = ended(one, begin(one, [line("a")]).id)
    assert batch.status == "completed"
    assert list(two.files.list()) == list(two.batches.list()) == []
    for name in (batch.input_file_id, batch.output_file_id):
        for ask in (two.files.retrieve, two.files.content, two.files.delete):
            with pytest.raises(openai.NotFoundError):
                ask(name)
    for ask in (two.batches.retrieve, two.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(batch.id)
    with pytest.raises(openai.NotFoundError):
        two.batches.create(input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h")
    assert client.get(f"{keyed.url}/v1/files").status_code == 401


def test_the_number_of_files_and_batches_is_limited(keyed: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    api = official(keyed.url, "two")
    monkeypatch.setattr(limits, "MAX_FILES", 2)
    names = [upload(api, [line("a")]) for _ in range(2)]
    with pytest.raises(openai.BadRequestError, match="delete some"):
        upload(api, [line("a")])
    upload(official(keyed.url, "three"), [line("a")])
    monkeypatch.setattr(limits, "MAX_FILES", 99)
    monkeypatch.setattr(limits, "MAX_FILES_BYTES", 300)
    with pytest.raises(openai.BadRequestError, match="delete some"):
        upload(api, [line("a")])
    monkeypatch.setattr(limits, "MAX_FILES_BYTES", 2**30)
    monkeypatch.setattr(limits, "MAX_OPEN_BATCHES", 1)
    monkeypatch.setattr(limits, "MAX_BATCHES", 2)
    with keyed.held():
        first = api.batches.create(input_file_id=names[0], endpoint=COMPLETIONS, completion_window="24h")
        with pytest.raises(openai.BadRequestError, match="wait until one ends"):
            api.batches.create(input_file_id=names[0], endpoint=COMPLETIONS, completion_window="24h")
        with pytest.raises(openai.BadRequestError, match="cancel the batch first"):
            api.files.delete(names[0])
    ended(api, first.id)
    later = [ended(api, begin_with(api, names[1]).id).id for _ in range(2)]
    assert [each.id for each in api.batches.list().data] == later[::-1], "the oldest was dropped"


@contextmanager
def full_disk(*, only: str = "") -> Iterator[None]:
    """Let every write fail with ENOSPC whose path contains ``only``."""
    sync = os.fsync

    def refuse(descriptor: int) -> None:
        if only in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        yield


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.server.batch.runner._FIRST_WAIT", 0.02)
    monkeypatch.setattr("paceline.server.batch.runner._LONGEST_WAIT", 0.05)


def waits_for_space(api: OpenAI, name: str, status: str) -> bool:
    batch = api.batches.retrieve(name)
    faults = [fault.code for fault in batch.errors.data] if batch.errors else []
    return (batch.status, faults) == (status, ["disk_full"])


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("where", "status"), [(".answers", "in_progress"), ("/files/", "finalizing")])
def test_a_batch_waits_while_the_disk_is_full_and_completes_afterwards(live: Live, where: str, status: str) -> None:
    api = official(live.url)
    lines = [line(str(number), f"text {number}") for number in range(12)] + [line("bad", top_p=2)]
    name = upload(api, lines)
    with full_disk(only=where):
        batch = api.batches.create(
            input_file_id=name, endpoint=COMPLETIONS, completion_window="24h", extra_body={"seed": 7}
        )
        wait_until(lambda: waits_for_space(api, batch.id, status))
        assert not [left for left in files_in(live) if left.endswith(".part")], "it occupies no row while it waits"
    batch = ended(api, batch.id)
    assert (batch.status, batch.errors) == ("completed", None)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (12, 1)
    whole = ended(api, begin(api, lines).id)
    assert texts(content(api, batch.output_file_id)) == texts(content(api, whole.output_file_id))


@pytest.mark.usefixtures("impatient")
def test_errors_that_a_step_finds_survive_a_full_disk() -> None:
    runner, found, steps = (
        BatchRunner.__new__(BatchRunner),
        BatchFaults(data=[BatchFault(code="x", message="y")]),
        list[object](),
    )
    stored = SimpleNamespace(document=SimpleNamespace(id="batch-1", errors=None))

    async def step(stored: Any) -> None:
        steps.append(stored.document.errors)
        if len(steps) == 1:
            stored.document.errors = found
        if len(steps) < 3:
            raise ApiError(507, "server_error", "No space left", code="disk_full")

    runner._step = step  # type: ignore[method-assign]
    asyncio.run(runner._step_with_space(stored))  # type: ignore[arg-type]
    assert steps == [None, found, found]


@pytest.mark.usefixtures("impatient")
def test_a_batch_that_waits_for_the_disk_can_be_cancelled(live: Live) -> None:
    api = official(live.url)
    name = upload(api, [line("a")])
    with full_disk(only=".answers"):
        batch = begin_with(api, name)
        wait_until(lambda: waits_for_space(api, batch.id, "in_progress"))
        assert api.batches.cancel(batch.id).status == "cancelling"
    batch = ended(api, batch.id)
    assert (batch.status, batch.errors) == ("cancelled", None)


@pytest.mark.usefixtures("impatient")
def test_a_batch_fails_after_a_day_of_full_disk(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    api = official(live.url)
    name = upload(api, [line("a")])
    monkeypatch.setattr("paceline.server.batch.runner._GIVE_UP", 0.2)
    with full_disk(only="/files/"):
        batch = ended(api, begin_with(api, name).id)
    assert batch.status == "failed"
    assert [(fault.code, "No space left" in fault.message) for fault in batch.errors.data] == [("disk_full", True)]
    assert batch.failed_at is not None


def test_a_disk_error_fails_the_batch_and_is_reported(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    api = official(live.url)
    name = upload(api, [line("a")])
    monkeypatch.setattr("paceline.server.batch.runner._split_output", broken)
    batch = ended(api, begin_with(api, name).id)
    assert batch.status == "failed"
    assert "Input/output error" in batch.errors.data[0].message
    assert str(live.context.config.batch_dir) not in batch.errors.data[0].message


def test_an_upload_or_a_batch_on_a_full_disk_is_refused_with_507_and_leaves_nothing(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    api = official(live.url)
    name, files, batches = upload(api, [line("a")]), files_in(live), len(api.batches.list(limit=100).data)
    form = {"file": ("f", b"x" * 200_000), "purpose": (None, "batch")}
    with full_disk():
        replies = [
            client.post(f"{live.url}/v1/files", files=form),
            live.post("/v1/batches", {"input_file_id": name, "endpoint": COMPLETIONS, "completion_window": "24h"}),
        ]
    assert [(reply.status_code, reply.json()["error"]["code"]) for reply in replies] == [(507, "disk_full")] * 2
    assert files_in(live) == files
    assert len(api.batches.list(limit=100).data) == batches
    assert not [record for record in caplog.records if record.exc_info]
    assert client.post(f"{live.url}/v1/files", files=form).status_code == 200


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB, which really fills up."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", path], capture_output=True)
    if mounted.returncode:
        pytest.skip("this user may not mount")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


@pytest.mark.usefixtures("impatient")
def test_on_a_really_full_disk_uploads_are_refused_and_batches_wait(tiny: str, tiny_disk: Path) -> None:
    form = {"file": ("f", b"x" * 10**6), "purpose": (None, "batch")}
    for live in start(ServerConfig(port=0, served_model_name="tiny", batch_dir=str(tiny_disk)), tiny):
        api = official(live.url)
        reply = client.post(f"{live.url}/v1/files", files=form)
        assert (reply.status_code, reply.json()["error"]["code"]) == (507, "disk_full")
        name = upload(api, [line(str(number)) for number in range(60)])
        batch = begin_with(api, name)
        wait_until(lambda: api.batches.retrieve(batch.id).request_counts.completed > 2)  # noqa: B023
        with suppress(OSError):
            (tiny_disk / "filler").write_bytes(b"x" * 2**18)
        wait_until(lambda: waits_for_space(api, batch.id, "in_progress"))  # noqa: B023
        subprocess.run(["mount", "-o", "remount,size=4m", tiny_disk], check=True)
        batch = ended(api, batch.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 60)
        assert len(content(api, batch.output_file_id)) == 60


def test_no_temporary_file_remains(live: Live) -> None:
    ended(official(live.url), begin(official(live.url), [line("a")]).id)
    assert not [name for name in files_in(live) if name.endswith(".part")]


def begin_with(api: OpenAI, name: str) -> Any:
    return api.batches.create(input_file_id=name, endpoint=COMPLETIONS, completion_window="24h")


def test_batches_and_files_of_one_second_keep_their_order(tmp_path: Path) -> None:
    """Batches run oldest first, and clients page through lists, also across a restart."""

    async def fill(store: BatchStore) -> None:
        for number in range(8):
            document = BatchObject(
                id=new_id("batch_"), endpoint="/v1/completions", input_file_id="file-x", completion_window="24h",
                created_at=5, expires_at=9, request_counts=BatchCounts(), metadata={"number": str(number)},
            )  # fmt: skip
            await store.add_batch(StoredBatch(owner="me", made=time.time_ns(), seed=0, document=document))

    store = BatchStore(tmp_path)
    asyncio.run(fill(store))
    store.close()
    (tmp_path / "batches" / "batch_gone.answers").write_text("")
    again = BatchStore(tmp_path)
    assert [each.document.metadata for each in again.batches.values()] == [{"number": str(n)} for n in range(8)]
    assert not (tmp_path / "batches" / "batch_gone.answers").exists()
    again.close()


def test_a_batch_directory_is_used_by_one_server(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    with pytest.raises(ParameterError, match="no other server"):
        BatchStore(tmp_path)
    store.close()
    (tmp_path / "files" / "x.part").write_text("half")
    (tmp_path / "files" / "y.data").write_text("an orphan")
    BatchStore(tmp_path).close()
    assert list((tmp_path / "files").iterdir()) == []
    (tmp_path / "batches" / "x.json").write_text("{}")
    with pytest.raises(ParameterError, match="a document that this server wrote"):
        BatchStore(tmp_path)
    with pytest.raises(ParameterError, match="batch_dir"):
        BatchStore(Path("/dev/null/x"))


@contextmanager
def slow_rounds(live: Live) -> Iterator[None]:
    """Slow rounds down to those of a large model."""
    engine, engine_step = live.context.llm.engine, Engine.step

    def step() -> list[RequestOutput]:
        time.sleep(0.02)
        return engine_step(engine)

    engine.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        del engine.step  # type: ignore[method-assign]


def test_a_cancelled_batch_keeps_its_output(live: Live) -> None:
    api = official(live.url)
    with slow_rounds(live):
        batch = begin(api, [line(str(number), max_tokens=16) for number in range(200)])
        wait_until(lambda: api.batches.retrieve(batch.id).request_counts.completed >= 3)
        assert api.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = ended(api, batch.id)
    assert batch.status == "cancelled"
    found = content(api, batch.output_file_id)
    assert 3 <= len(found) == batch.request_counts.completed < 200
    live.wait_until_idle()
    with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
        api.batches.cancel(ended(api, begin(api, [line("a")]).id).id)


def test_interactive_requests_run_before_a_batch(live: Live) -> None:
    """Waiting lines of a batch make way for interactive requests."""
    api, engine = official(live.url), live.context.llm.engine

    def waiting() -> list[int]:
        with live.held():
            return [row.priority for row in engine.scheduler.waiting]

    with slow_rounds(live):
        batch = begin(api, [line(str(number), max_tokens=32, ignore_eos=True) for number in range(100)])
        wait_until(waiting)
        assert min(waiting(), default=BATCH_PRIORITY) >= BATCH_PRIORITY
        reply = api.completions.create(model="tiny", prompt="x", max_tokens=2, extra_body={"priority": 2**31 - 1})
        assert reply.choices
        assert api.batches.retrieve(batch.id).status == "in_progress", "it did not wait for the whole batch"
        api.batches.cancel(batch.id)
    ended(api, batch.id)
    live.wait_until_idle()


def test_an_expired_batch_keeps_its_output(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    api = official(live.url)
    monkeypatch.setattr("paceline.server.batch.runner._WINDOW", 1)
    wait_until(lambda: time.time() % 1 < 0.5)  # the window ends with a second: half of one is left for the first lines
    with slow_rounds(live):
        batch = ended(api, begin(api, [line(str(number)) for number in range(500)]).id)
    assert batch.status == "expired"
    assert len(content(api, batch.output_file_id)) == batch.request_counts.completed
    assert 0 < batch.request_counts.completed < 500
    assert batch.expired_at is not None


def test_a_restarted_server_resumes_batches_and_reports_their_counts_while_they_wait(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two lives the count on disk becomes older than the output, as after a kill."""
    lines = [line(str(number), f"text {number}") for number in range(60)]
    config = ServerConfig(port=0, served_model_name="tiny", batch_dir=str(tmp_path), shutdown_timeout=0.1)
    engine_step = Engine.step

    def completed(live: Live) -> int:
        return int(official(live.url).batches.retrieve(name).request_counts.completed)

    with monkeypatch.context() as patched:  # at full speed one life could finish all lines
        patched.setattr(Engine, "step", lambda engine: (time.sleep(0.05), engine_step(engine))[1])
        for live in start(config, tiny):
            name = begin(official(live.url), lines).id
            wait_until(lambda: completed(live) > 1)  # noqa: B023
    stopped = next((tmp_path / "batches").glob("*.json"))
    document = json.loads(stopped.read_text())
    assert document["document"]["status"] == "in_progress"
    document["document"]["request_counts"]["completed"] = 0
    stopped.write_text(json.dumps(document))
    with monkeypatch.context() as patched:  # as if the engine were loading
        patched.setattr(BatchRunner, "_wait_until_ready", lambda _self: asyncio.sleep(3600))
        for live in start(config, tiny):
            wait_until(lambda: completed(live) > 1)  # noqa: B023
            assert completed(live) < 60
    for live in start(config, tiny):
        api = official(live.url)
        batch = ended(api, name)
        whole = ended(api, begin(api, lines).id)
        assert texts(content(api, batch.output_file_id)) == texts(content(api, whole.output_file_id))
        assert batch.request_counts.completed == 60


@pytest.mark.slow
def test_a_server_killed_at_random_loses_and_repeats_no_line(tiny: str, tmp_path: Path) -> None:
    lines = [line(str(number), f"text {number}", max_tokens=16) for number in range(400)]
    chance, flags, name = random.Random(), ("--batch-dir", str(tmp_path / "kept")), ""
    for life in range(6):
        with Served(tiny, tmp_path / f"log{life}", *flags).ready() as served:
            api = official(served.url)
            name = name or begin(api, lines).id
            if life == 5:
                wait_until(lambda: api.batches.retrieve(name).status in ENDED, seconds=240)  # noqa: B023
                batch, whole = api.batches.retrieve(name), begin(api, lines)
                wait_until(lambda: api.batches.retrieve(whole.id).status in ENDED, seconds=240)  # noqa: B023
                output = api.batches.retrieve(whole.id).output_file_id
                assert batch.request_counts.completed == 400
                assert texts(content(api, batch.output_file_id)) == texts(content(api, output))
            else:
                more = api.batches.retrieve(name).request_counts.completed + chance.randrange(1, 60)
                wait_until(lambda: api.batches.retrieve(name).request_counts.completed >= more)  # noqa: B023
                served.process.send_signal(signal.SIGKILL)
