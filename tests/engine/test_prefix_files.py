"""Prefixes in a directory: found after a restart, for their scope and model alone; damaged files change no answer."""

from __future__ import annotations

import functools
import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.test_prefixes import ask, finish, prompt_of
from head_support import tiny_native_head
from paceline.config import SamplingParams
from paceline.core.outputs import RequestOutput
from paceline.core.row_tables import GROWS
from paceline.drafters.heads.native import NativeHead
from paceline.engine import stores
from paceline.engine.engine import Engine, Request
from paceline.engine.prefix_files import PrefixFiles
from paceline.engine.prefixes import PrefixCounts
from paceline.errors import ParameterError
from paceline.models.base import AnyModel
from recurrent_support import on_kernels, tiny_lfm2, tiny_native_recurrent
from toy import FlatToy, ToyModel, answers, make_engine, run, tiny_native

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.skipif(not GROWS, reason="rows do not grow here")]

GREEDY = SamplingParams(temperature=0, max_tokens=5)
SAMPLED = SamplingParams(temperature=1, max_tokens=5, seed=3)
SIZE = 70  # tokens of a prompt: enough for a file

MODELS: dict[str, Callable[[], AnyModel]] = {
    "transformer": lambda: tiny_native(3),
    "gated delta net": functools.cache(tiny_native_recurrent),
    "short convolution": functools.cache(lambda: on_kernels(tiny_lfm2())),
}

DRAFTS: dict[str, Callable[[], AnyModel]] = {
    "model": lambda: tiny_native(3, 1),
    "head": functools.cache(lambda: tiny_native_head(tiny_native(3), 72)),
}


@pytest.fixture(autouse=True)
def _from_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of tests count as loaded from files."""
    monkeypatch.setattr(stores, "is_from_files", lambda _model: True)


def open_engine(path: Path, kind: str = "transformer", draft: AnyModel | None = None, **options: Any) -> Engine:
    drafter = "ngram" if draft is None else "feature" if isinstance(draft, NativeHead) else "model"
    options = {"max_batch_size": 2, "drafter": drafter} | options
    return make_engine(MODELS[kind](), draft, prefix_dir=str(path), attention="auto", **options)


def files(path: Path) -> list[Path]:
    return sorted(path.glob("*.prefix"))


def prompts(count: int) -> list[list[int]]:
    return [prompt_of(SIZE, seed) for seed in range(count)]


def next_turns(outputs: list[RequestOutput]) -> list[list[int]]:
    return [[*each.prompt_token_ids, *each.outputs[0].token_ids, *prompt_of(4, 99)] for each in outputs]


def contents(engine: Engine, text: list[int]) -> list[torch.Tensor]:
    """Return what all caches hold of the first tokens of a text."""
    prefixes = engine.slots.free.prefixes.items()
    slot = next(slot for slot, prefix in prefixes if prefix.tokens[:SIZE].tolist() == text[:SIZE])
    rows = [decoder.row(slot, SIZE - 1, SIZE - 1) for decoder in engine.parts.decoders]
    return [row[name] for row in rows for name in sorted(row)]


def directory(engine: Engine) -> PrefixFiles:
    assert engine.slots.stored is not None
    return engine.slots.stored.files


@pytest.mark.parametrize(
    ("kind", "drafts", "params", "dtype"),
    [
        ("transformer", None, GREEDY, "auto"),
        ("transformer", "model", GREEDY, "auto"),
        ("transformer", "model", SAMPLED, "auto"),
        ("transformer", "model", SAMPLED, "int8"),
        ("transformer", "head", GREEDY, "auto"),
        ("transformer", "head", GREEDY, "int8"),
        ("gated delta net", None, SAMPLED, "auto"),
        ("gated delta net", None, SAMPLED, "int8"),
        ("short convolution", None, GREEDY, "auto"),
    ],
)
def test_conversations_go_on_after_a_restart(
    tmp_path: Path, kind: str, drafts: str | None, params: SamplingParams, dtype: str
) -> None:
    draft = None if drafts is None else DRAFTS[drafts]()
    plain = make_engine(MODELS[kind](), prefix_cache=False, kv_cache_dtype=dtype)
    first, texts = open_engine(tmp_path, kind, draft, kv_cache_dtype=dtype), prompts(3)
    outputs = run(first, texts, [params] * 3)
    first.close()
    assert len(files(tmp_path)) == first.slots.free.counts.written == 3
    kept = open_engine(tmp_path / "kept", kind, draft, kv_cache_dtype=dtype)
    run(kept, texts, [params] * 3)
    second, texts = open_engine(tmp_path, kind, draft, kv_cache_dtype=dtype), next_turns(outputs)
    in_memory, outputs = (run(each, texts, [params] * 3) for each in (kept, second))
    assert answers(in_memory) == answers(outputs)
    if drafts is not None:
        for one, other in zip(contents(kept, texts[0]), contents(second, texts[0]), strict=True):
            assert torch.equal(one, other), "a draft model or head has what it had"
    assert answers(outputs) == answers(run(plain, texts, [params] * 3))
    assert [output.cached_tokens for output in outputs] == [SIZE + 4] * 3, "all but the answer's last token"
    assert second.slots.free.counts == PrefixCounts(reused=0, tokens=3 * (SIZE + 4), read=3)
    second.close()
    assert len(files(tmp_path)) == 3, "the longer text replaces its beginning"
    assert "3 in files" in second.describe()


@pytest.mark.parametrize("kind", MODELS)
def test_what_gives_way_in_memory_is_read_back(tmp_path: Path, kind: str) -> None:
    """Memory beside two rows is for one prefix; seven conversations take turns."""
    model = MODELS[kind]()
    room = open_engine(tmp_path, kind).room
    engine = open_engine(tmp_path, kind, prefix_memory=room.prefix_bytes(SIZE + 10))
    plain, texts, found = make_engine(model, prefix_cache=False), prompts(7), 0
    for _ in range(3):
        outputs = [ask(engine, text, GREEDY) for text in texts]
        engine.scheduler.check_integrity()
        directory(engine)._writer.submit(lambda: None).result()
        assert answers(outputs) == answers(run(plain, texts, [GREEDY] * 7))
        found += sum(output.cached_tokens > SIZE // 2 for output in outputs)
        texts = next_turns(outputs)
    counts = engine.slots.free.counts
    assert found == 14, "all but the first turns"
    assert (counts.read, len(directory(engine))) == (14, 7)
    assert counts.refused == 0
    engine.close()


def test_a_file_is_of_its_scope_alone_and_tells_nothing_of_it(tmp_path: Path) -> None:
    engine = open_engine(tmp_path / "new")
    owned = Request(prompts(1)[0], GREEDY, prefix_owner="owner-of-a-key")
    private = Request(prompt_of(SIZE, 5), SamplingParams(temperature=0, max_tokens=5, keep_prefix=False))
    for request in (owned, private):
        engine.add(request)
    finish(engine)
    engine.close()
    (file,) = files(tmp_path / "new")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert b"owner" not in file.read_bytes()
    for owner, salt, cached in (
        ("other", None, 0),
        ("", None, 0),
        ("owner-of-a-key", "s", 0),
        ("owner-of-a-key", None, 69),
    ):
        again = open_engine(tmp_path / "new")
        params = SamplingParams(temperature=0, max_tokens=5, cache_salt=salt)
        output = again.add(Request(prompts(1)[0], params, prefix_owner=owner))
        finish(again)
        assert output.cached_tokens == cached
        again.clear()


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def reheaded(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """A file with another header."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def swap_shapes(header: dict[str, Any]) -> None:
    """Two numbers of a shape change places: sizes and the checksum are right."""
    shape = header["0.table0"]["shape"]
    shape[1], shape[3] = shape[3], shape[1]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "cut in its header": lambda data: data[:50],
    "a bit of the keys": lambda data: flipped(data, len(data) // 2),
    "a bit of the tokens": lambda data: flipped(data, len(data) - 4),
    "a long header": lambda data: (2**63).to_bytes(8, "little") + data[8:],
    "no JSON": lambda data: data[:8] + b"[" * (len(data) - 8),
    "a list": lambda data: reheaded(data, lambda header: header.update({"0.table0": []})),
    "other shapes": lambda data: reheaded(data, swap_shapes),
    "a negative size": lambda data: reheaded(data, lambda header: header["tokens"].update(shape=[-70])),
    "no tokens": lambda data: reheaded(data, lambda header: header.update({"token": header.pop("tokens")})),
    "an overlap": lambda data: reheaded(data, lambda header: header["tokens"].update(data_offsets=[0, 296])),
    "metadata that is a text": lambda data: reheaded(data, lambda header: header.update(__metadata__="a")),
    "no checksum": lambda data: reheaded(data, lambda header: header["__metadata__"].pop("sha256")),
}


@pytest.mark.parametrize("when", ["at the start", "later"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_removed_and_changes_no_answer(tmp_path: Path, damage: str, when: str) -> None:
    first = open_engine(tmp_path)
    told = ask(first, prompts(1)[0], GREEDY)
    first.close()
    (file,) = files(tmp_path)
    late = open_engine(tmp_path) if when == "later" else None
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    engine = late or open_engine(tmp_path)
    again = ask(engine, prompts(1)[0], GREEDY)
    assert answers([again]) == answers([told])
    assert (again.cached_tokens, engine.slots.free.counts.refused, files(tmp_path)) == (0, 1, [])
    engine.close()
    assert len(files(tmp_path)) == 1


def test_what_is_no_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a.prefix").mkdir()
    (tmp_path / "b.prefix").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "c.prefix")
    (tmp_path / "note.txt").write_text("mine")
    engine = open_engine(tmp_path)
    ask(engine, prompts(1)[0], GREEDY)
    engine.close()
    assert len(list(tmp_path.iterdir())) == 5
    assert engine.slots.free.counts.refused == 0


def test_files_of_other_models_are_ignored_and_count_in_the_size(tmp_path: Path) -> None:
    first = open_engine(tmp_path)
    run(first, prompts(2), [GREEDY] * 2)
    first.close()
    one = files(tmp_path)[0].stat().st_size
    for kind, draft, dtype in (
        ("gated delta net", None, "auto"),
        ("transformer", tiny_native(3, 1), "auto"),
        ("transformer", None, "int8"),
    ):
        other = open_engine(tmp_path, kind, draft, kv_cache_dtype=dtype)
        assert ask(other, prompts(1)[0], GREEDY).cached_tokens == 0
        assert len(directory(other)) == 0
    assert len(files(tmp_path)) == 2
    small = open_engine(tmp_path, prefix_dir_size=2 * one)
    assert ask(small, prompts(1)[0], GREEDY).cached_tokens == SIZE - 1, "used: the other one is older now"
    ask(small, prompt_of(SIZE, 7), GREEDY)
    small.close()
    assert sum(file.stat().st_size for file in files(tmp_path)) <= 2 * one
    again = open_engine(tmp_path)
    assert [ask(again, prompt_of(SIZE, seed), GREEDY).cached_tokens for seed in (0, 1, 7)] == [SIZE - 1, 0, SIZE - 1]


def test_rows_go_on_while_a_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_engine(tmp_path)
    run(first, prompts(2), [GREEDY] * 2)
    first.close()
    go, read = threading.Event(), PrefixFiles._read
    monkeypatch.setattr(PrefixFiles, "_read", lambda *each: go.wait(20) and read(*each))
    engine = open_engine(tmp_path)
    waiting = [engine.add(Request(text, GREEDY, request_id=f"{size}")) for size, text in enumerate(prompts(2))]
    engine.step()
    assert [sequence.waits for sequence in engine.scheduler.prefilling] == [True, True]
    engine.abort("1")
    other = engine.add(Request(prompt_of(9, 4), SamplingParams(temperature=0, max_tokens=20)))
    while not other.finished:
        engine.step()
        engine.scheduler.check_integrity()
    assert not waiting[0].outputs[0].token_ids
    go.set()
    finish(engine)
    assert waiting[0].cached_tokens == SIZE - 1
    assert answers([waiting[0], other]) == answers(
        run(
            make_engine(tiny_native(3)),
            [prompts(1)[0], prompt_of(9, 4)],
            [GREEDY, SamplingParams(temperature=0, max_tokens=20)],
        )
    )


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for name in ("file", "open"):
        with pytest.raises(ParameterError, match=r"prefix_dir=.* a directory"):
            open_engine(tmp_path / name)
    with pytest.raises(ParameterError, match=r"prefix_dir=.* it needs prefix_cache"):
        open_engine(tmp_path, prefix_cache=False)
    with pytest.raises(ParameterError, match=r"prefix_dir=.* and the CPU kernels"):
        make_engine(ToyModel(), prefix_dir=str(tmp_path))
    monkeypatch.undo()
    with pytest.raises(ParameterError, match=r"prefix_dir=.* not loaded from files"):
        make_engine(FlatToy(), prefix_dir=str(tmp_path))
