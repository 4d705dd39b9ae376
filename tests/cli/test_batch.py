"""``paceline batch`` answers every line once, however often the process is killed; hostile lines affect no others."""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from forked import Forked
from forked import paceline as run_paceline
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequences import Sequence
from paceline.errors import PacelineError, ParameterError
from paceline.server.batch.lines import count_lines, lines_of, seed_of
from paceline.server.batch.output import OutputFile
from paceline.server.batch.window import LineResult, LineWriter, run_all
from polling import wait_until

ENGINE = ("--dtype", "float32", "--max-batch-size", "4", "--threads", "1", "--served-model-name", "tiny", "--quiet")
SEEDED = (*ENGINE, "--seed", "7")


def chat(name: str, text: str, **body: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 6} | body
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def completion(name: str, text: str, **body: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": text, "max_tokens": 6} | body
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


def write(path: Path, lines: list[Any]) -> Path:
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(raw) + b"\n")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def said(entry: dict[str, Any]) -> list[str]:
    """The texts of an answer, whichever form it has."""
    if "outputs" in entry:
        return [output["text"] for output in entry["outputs"]]
    choices = entry["response"]["body"]["choices"]
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]


def texts(path: Path) -> dict[str, list[str]]:
    return {str(entry.get("custom_id", entry.get("index"))): said(entry) for entry in read(path)}


@pytest.fixture
def mixed() -> list[dict[str, Any]]:
    """Both forms; all but one without a seed."""
    plain = {"prompt": "plain", "max_tokens": 6, "custom_id": "named"}
    return [
        completion("a", "one", n=2),
        chat("b", "two"),
        {"prompt": "three", "max_tokens": 6},
        plain,
        completion("c", "five", seed=3, echo=True, logprobs=1),
        {"messages": [{"role": "user", "content": "six"}], "max_tokens": 6, "n": 2},
    ]


def test_both_forms_in_their_order_with_openais_shape(
    paceline: Any, tiny: str, tmp_path: Path, mixed: list[Any]
) -> None:
    source, output = write(tmp_path / "in", mixed), tmp_path / "out"
    assert paceline("batch", str(source), str(output), tiny, *SEEDED, "--in-order").exit_code == 0
    entries = read(output)
    assert [entry.get("custom_id", entry.get("index")) for entry in entries] == ["a", "b", 2, "named", "c", 5]
    first, answer = entries[0], entries[0]["response"]
    assert set(first) == {"id", "custom_id", "response", "error"}
    assert (first["error"], answer["status_code"], answer["body"]["object"]) == (None, 200, "text_completion")
    assert answer["request_id"] == answer["body"]["id"]
    assert answer["body"]["usage"]["completion_tokens"] == 12
    assert entries[2]["outputs"][0]["metrics"]["output_tokens"] == 6
    assert len({entry["id"] for entry in entries}) == 6


def test_budgets_of_lines_begin_with_their_rows(
    paceline: Any, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines wait behind other lines of their file, in both forms."""
    started, start = [], Scheduler._start

    def recorded(self: Scheduler, sequence: Sequence, rows_soon: int) -> None:
        assert sequence.deadline == math.inf
        start(self, sequence, rows_soon)
        if sequence.params.time_budget is not None:  # not the warm-up's
            started.append(sequence.deadline - time.monotonic())

    monkeypatch.setattr(Scheduler, "_start", recorded)
    lines = [completion("a", "one", deadline_ms=60_000), chat("b", "two", deadline_ms=60_000)]
    lines.append({"prompt": "three", "max_tokens": 6, "time_budget": 60.0})
    paceline("batch", str(write(tmp_path / "in", lines)), str(tmp_path / "out"), tiny, *SEEDED)
    assert len(started) == 3
    assert all(50 < seconds <= 60 for seconds in started)


def test_a_line_says_the_same_alone_in_another_order_and_after_a_resume(
    paceline: Any, tiny: str, tmp_path: Path, mixed: list[Any]
) -> None:
    whole = tmp_path / "whole"
    paceline("batch", str(write(tmp_path / "in", mixed)), str(whole), tiny, *SEEDED)
    named = [line for line in mixed if "custom_id" in line]
    for number, lines in enumerate([named[::-1], named[:1], mixed[:3]]):
        output = tmp_path / f"out{number}"
        paceline("batch", str(write(tmp_path / f"in{number}", lines)), str(output), tiny, *SEEDED)
        assert texts(output).items() <= texts(whole).items()
        assert len(texts(output)) == len(lines)
    other = tmp_path / "other"
    paceline("batch", str(tmp_path / "in"), str(other), tiny, *ENGINE, "--seed", "8")
    changed = {name for name, found in texts(other).items() if found != texts(whole)[name]}
    assert {"a", "named", "2"} <= changed
    assert "c" not in changed, "it has a seed of its own"


def test_what_was_written_at_any_byte_is_gone_on_with(paceline: Any, tiny: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in", [completion(str(number), f"text {number}") for number in range(6)])
    whole, output = tmp_path / "whole", tmp_path / "out"
    assert paceline("batch", str(source), str(whole), tiny, *SEEDED).exit_code == 0
    written = whole.read_bytes()
    beside = (tmp_path / "whole.job").read_text()
    for size in (0, written.index(b"\n") + 1, len(written) - 1):
        output.write_bytes(written[:size])
        (tmp_path / "out.job").write_text(beside)
        kept = written[:size].count(b"\n")
        result = paceline("batch", str(source), str(output), tiny, *SEEDED, "--resume")
        assert result.exit_code == 0, result.stderr
        assert output.read_bytes().splitlines()[:kept] == written.splitlines()[:kept]
        assert sorted(entry["custom_id"] for entry in read(output)) == list("012345")
        assert texts(output) == texts(whole)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"{custom_id: 1}", "not valid JSON"),
    "no object": (b"[1, 2]", "line 2: body"),
    "nothing in it": (b"{}", "custom_id: Field required"),
    "no text": (b'{"custom_id": "\xff\xfe"}', "not valid JSON"),
    "not a number": (b'{"custom_id": "x", "method": NaN}', "not valid JSON"),
    "deep": (b"[" * 30000 + b"]" * 30000, "line 2"),
    "long": (b'"' + b"x" * (5 * 2**20) + b'"', "line 2 is longer than 4194304 bytes"),
    "many parts": (b"[" + b"{}," * 40000 + b"{}]", "the body is too complex"),
    "a number as name": (json.dumps(completion("x", "y") | {"custom_id": 5}).encode(), "custom_id: Input should be"),
    "an empty name": (json.dumps(completion("", "y")).encode(), "custom_id: String should have at least 1"),
    "another method": (json.dumps(completion("x", "y") | {"method": "GET"}).encode(), "method: Input should be 'POST'"),
    "another url": (json.dumps(completion("x", "y") | {"url": "/v1/embeddings"}).encode(), "url: Input should be"),
    "a list as body": (json.dumps(completion("x", "y") | {"body": []}).encode(), "body: Input should be"),
    "more than that": (json.dumps(completion("x", "y") | {"extra": 1}).encode(), "unknown field 'extra'"),
    "twice": (json.dumps(completion("good", "y")).encode(), "an earlier line has the custom_id 'good'"),
    "half a character": (rb'{"custom_id": "\ud800"}', "not valid JSON"),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": (completion("x", "y", temprature=1), "unknown field 'temprature'"),
    "out of range": (completion("x", "y", top_p=2), "top_p"),
    "as a stream": (completion("x", "y", stream=True), "remove stream"),
    "another model": (completion("x", "y", model="gpt"), "'gpt' does not exist"),
    "too long": (completion("x", "y" * 600), "600 tokens"),
    "no messages": (chat("x", "y", messages=[]), "messages"),
}
PLAIN: dict[str, tuple[dict[str, Any], str]] = {
    "both": ({"prompt": "x", "messages": []}, "either"),
    "wrong type": ({"prompt": 5}, "a string or a list of token ids"),
    "unknown key": ({"prompt": "x", "temprature": 1}, "temprature=1"),
    "no content": ({"messages": [{"role": "user"}]}, "role and content"),
    "a name that is none": ({"prompt": "x", "custom_id": []}, '"custom_id" is a string'),
    "a name again": ({"prompt": "x", "custom_id": "good"}, "an earlier line"),
    "no such token": ({"prompt": [100000]}, "100000"),
    "too long": ({"prompt": "x" * 600}, "600"),
    "huge number": ({"prompt": "x", "seed": 10**400}, "seed"),
}


def test_hostile_lines_are_errors_of_their_own(paceline: Any, tiny: str, tmp_path: Path) -> None:
    """One after the other between good ones: each has a line that says why, the good ones have their answers."""
    for number, (raw, why) in enumerate(HOSTILE.values()):
        source = write(tmp_path / f"in{number}", [completion("good", "x"), raw])
        with source.open("rb") as file:
            lines = list(lines_of(file, 2**22))
        assert [line.number for line in lines] == [1, 2], why
    source = tmp_path / "in"
    good = completion("good", "hello")
    raws = [raw for raw, _ in HOSTILE.values()]
    refused = [line | {"custom_id": str(i)} for i, (line, _) in enumerate(REFUSED.values())]
    plain = [line for line, _ in PLAIN.values()]
    write(source, [good, *raws, b"", b"   ", *refused, *plain, completion("last", "bye")])
    output = tmp_path / "out"
    result = paceline("batch", str(source), str(output), tiny, *SEEDED, "--in-order")
    assert result.exit_code == 2
    assert f"{len(raws) + len(refused) + len(plain)} lines could not be answered" in result.stderr
    first, *bad, last = read(output)
    assert (first["custom_id"], last["custom_id"]) == ("good", "last")
    assert first["response"]["status_code"] == last["response"]["status_code"] == 200
    for number, (entry, (_, why)) in enumerate(zip(bad, HOSTILE.values(), strict=False)):
        assert entry["response"] is None
        assert why.replace("line 2", f"line {number + 2}") in entry["error"]["message"]
    for entry, (_, why) in zip(bad[len(raws) :], REFUSED.values(), strict=False):
        assert entry["response"]["status_code"] == (404 if "exist" in why else 400)
        assert entry["error"] is None
        assert why in entry["response"]["body"]["error"]["message"]
    for entry, (_, why) in zip(bad[len(raws) + len(refused) :], PLAIN.values(), strict=True):
        assert why in entry["error"]["message"]
        assert "index" in entry
    again = paceline("batch", str(source), str(output), tiny, *SEEDED, "--resume")
    assert again.exit_code == 2, "nothing was left to do, but OUTPUT still has lines without an answer"
    assert f"{len(bad)} lines could not be answered" in again.stderr
    assert len(read(output)) == len(bad) + 2


def test_a_refused_line_keeps_its_custom_id(paceline: Any, tiny: str, tmp_path: Path) -> None:
    lines = [
        {"prompt": "x", "max_tokens": -3, "custom_id": "plain"},
        completion("openai", "x", max_tokens=-3),
        {"prompt": 5, "custom_id": "no prompt"},
        {"prompt": "x", "custom_id": ["no name"]},
    ]
    output = tmp_path / "out"
    assert (
        paceline("batch", str(write(tmp_path / "in", lines)), str(output), tiny, *SEEDED, "--in-order").exit_code == 2
    )
    assert [entry.get("custom_id") for entry in read(output)] == ["plain", "openai", "no prompt", None]
    assert all("max_tokens" in json.dumps(entry) for entry in read(output)[:2])


@pytest.mark.slow
def test_a_line_may_ask_for_a_structure(paceline: Any, tiny: str, tmp_path: Path) -> None:
    pytest.importorskip("llguidance", reason="structured outputs need the extra 'structured'")
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    held = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    lines = [
        chat("x", "y", response_format=held, max_tokens=100),
        {"prompt": "x", "structured_outputs": {"json": schema}},
    ]
    output, flags = tmp_path / "out", (*SEEDED, "--in-order")
    assert paceline("batch", str(write(tmp_path / "in", lines)), str(output), tiny, *flags).exit_code == 0
    assert [set(json.loads(said(entry)[0])) for entry in read(output)] == [{"a"}, {"a"}]


# What the command line refuses


def test_other_settings_and_other_lines_are_not_gone_on_with(paceline: Any, tiny: str, tmp_path: Path) -> None:
    source, output = write(tmp_path / "in", [completion("a", "x"), completion("b", "y")]), tmp_path / "out"
    job = ("batch", str(source), str(output), tiny)
    assert paceline(*job, *SEEDED).exit_code == 0
    assert "with --resume" in paceline(*job, *SEEDED).stderr
    assert "--resume: seed=8" in paceline(*job, *ENGINE, "--seed", "8", "--resume").stderr
    assert "--resume: max_model_len=64" in paceline(*job, *SEEDED, "--max-model-len", "64", "--resume").stderr
    other = paceline(*job, *SEEDED, "--temperature", "0.5", "--resume").stderr
    assert "--resume: temperature=0.5 is not allowed: 1.0, with which out was begun" in other
    assert paceline(*job, *ENGINE, "--resume").exit_code == 0, "the seed is kept"
    write(source, [completion("a", "x"), completion("b", "z")])
    assert "line 2 has changed" in paceline(*job, *SEEDED, "--resume").stderr
    write(source, [completion("a", "x"), completion("b", "y"), completion("c", "more")])
    assert paceline(*job, *SEEDED, "--resume").exit_code == 0
    assert sorted(texts(output)) == ["a", "b", "c"]
    (tmp_path / "out.job").unlink()
    assert "out.job" in paceline(*job, *SEEDED, "--resume").stderr


def test_parameters_of_the_command_line_are_for_plain_lines(paceline: Any, tiny: str, tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", [{"prompt": "x"}, {"prompt": "y", "max_tokens": 2}])
    result = paceline("batch", str(plain), str(tmp_path / "one"), tiny, *SEEDED, "--max-tokens", "5", "--in-order")
    assert result.exit_code == 0
    assert [entry["outputs"][0]["metrics"]["output_tokens"] for entry in read(tmp_path / "one")] == [5, 2]
    openai = write(tmp_path / "openai", [completion("a", "x")])
    result = paceline("batch", str(openai), str(tmp_path / "two"), tiny, *SEEDED, "--max-tokens", "5")
    assert result.exit_code == 2
    assert "--max-tokens=5 is not allowed" in result.stderr


@pytest.mark.parametrize(
    ("given", "why"),
    [(("absent", "out"), "INPUT"), (("in", "in"), "OUTPUT"), (("in", "."), "OUTPUT"), (("in", "no/out"), "OUTPUT")],
)
def test_files_are_looked_at_before_a_model_is_loaded(
    paceline: Any, tmp_path: Path, given: tuple[str, str], why: str
) -> None:
    write(tmp_path / "in", [completion("a", "x")])
    result = paceline("batch", *(str(tmp_path / name) for name in given), "no-such-model", *ENGINE)
    assert result.exit_code == 2
    (error,) = result.stderr.splitlines()
    assert error.startswith(f"error: {why}=")


def test_a_file_has_one_writer_and_holds_answers_alone(tmp_path: Path) -> None:
    with OutputFile("OUTPUT", tmp_path / "out"), pytest.raises(ParameterError, match="no other process"):
        OutputFile("OUTPUT", tmp_path / "out")
    for line in ("[]", "{}", "x", '{"id": 5}', '{"id": "cmpl-1"}', '{"id": "batch_req_x_y"}'):
        (tmp_path / "other").write_text(line + "\n")
        with pytest.raises(PacelineError, match="is not the output of a batch"):
            OutputFile("OUTPUT", tmp_path / "other")
        assert (tmp_path / "other").read_text() == line + "\n"


# Lines, one by one


def test_lines_are_read_one_by_one() -> None:
    """A file without end is not read as a whole."""

    class Endless(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            text = (b"x\n\n" * len(buffer))[: len(buffer)]
            buffer[:] = text
            return len(text)

    lines = lines_of(io.BufferedReader(Endless()), 100)  # type: ignore[type-var]
    assert [next(lines).index for _ in range(5)] == [0, 1, 2, 3, 4]


def test_lines_have_the_same_name_whatever_ends_them() -> None:
    def names(content: bytes) -> list[tuple[str, int, bytes | None]]:
        return [(line.name, line.number, line.content) for line in lines_of(io.BytesIO(content), 4)]

    found = names(b"ab\n\ncd\n")
    assert found == names(b"ab\r\n \ncd")
    assert [(number, content) for _, number, content in found] == [(1, b"ab"), (3, b"cd")]
    assert [content for *_, content in names(b"\xef\xbb\xbfabcd\nabcde\nabcd")] == [b"abcd", None, b"abcd"]
    for content in (b"", b"\n", b"a", b"a\n", b"\n\na\n \nb", b"a\n" * 5):
        assert count_lines(io.BytesIO(content)) == len(names(content)), content


def test_seeds_are_those_of_the_name() -> None:
    assert seed_of(7, "id a") == 9033431905534366171, "in every version: files are gone on with"
    assert len({seed_of(seed, f"{kind} {name}") for seed in (7, 8) for kind in ("id", "index") for name in "12"}) == 8
    assert all(0 <= seed_of(3, str(name)) < 2**63 for name in range(100))


class Counted:
    """Chores that count how many of them there are, and end in any order."""

    def __init__(self) -> None:
        self.alive = self.most = 0
        self.random = random.Random(3)

    async def chores(self, number: int) -> AsyncIterator[Any]:
        for index in range(number):
            self.alive += 1
            self.most = max(self.most, self.alive)
            yield self.LineTask(self, index)

    class LineTask:
        def __init__(self, owner: Counted, index: int) -> None:
            self.owner, self.index = owner, index

        async def run(self) -> LineResult:
            for _ in range(self.owner.random.randrange(8)):
                await asyncio.sleep(0)
            return LineResult(str(self.index).encode(), False)


@pytest.mark.parametrize("in_order", [False, True])
def test_no_more_lines_are_in_memory_than_the_window_has(in_order: bool) -> None:
    counted, written = Counted(), bytearray()

    def tell(_: LineResult) -> None:
        counted.alive -= 1

    async def run() -> None:
        scribe = LineWriter(written.extend)
        await run_all(counted.chores(500), scribe, window=8, in_order=in_order, on_result=tell)

    asyncio.run(run())
    numbers = [int(line) for line in bytes(written).split()]
    assert sorted(numbers) == list(range(500))
    assert (numbers == sorted(numbers)) is in_order
    assert counted.most <= 8 + 1, "one more is read and waits for its place"


def test_what_ends_the_batch_is_raised_as_it_is() -> None:
    async def chores() -> AsyncIterator[Any]:
        yield Bad()

    class Bad:
        async def run(self) -> LineResult:
            raise PacelineError("the disk is full")

    with pytest.raises(PacelineError, match="the disk is full"):
        asyncio.run(run_all(chores(), LineWriter(lambda _: None), window=2))


def test_no_answer_breaks_its_line_however_lines_are_told_apart() -> None:
    written = bytearray()

    async def run() -> None:
        scribe = LineWriter(written.extend)
        for text in ("a\x85b", "c\u2028d\u2029e", "é\u3000ß"):
            scribe.put(json.dumps(text, ensure_ascii=False).encode())
        await scribe.flush()

    asyncio.run(run())
    lines = written.decode().splitlines()
    assert [json.loads(line) for line in lines] == ["a\x85b", "c\u2028d\u2029e", "é\u3000ß"]


# Interrupted and killed


def test_an_interrupted_job_says_how_many_lines_are_done_and_how_to_go_on(tiny: str, tmp_path: Path) -> None:
    """It waits neither for the line that is being answered nor for more input."""
    output, told_in = tmp_path / "out", tmp_path / "told"
    told_in.touch()
    os.mkfifo(tmp_path / "in")
    process = Forked(run_paceline, _job(tiny, Path("-"), output), stdin=tmp_path / "in", stderr=told_in)
    try:
        with (tmp_path / "in").open("wb") as lines:
            for line in (completion("short", "text"), completion("long", "text", max_tokens=450, ignore_eos=True)):
                lines.write(json.dumps(line).encode() + b"\n")
            lines.flush()  # and then waits, open
            wait_until(lambda: _lines_in(output) >= 1 or process.poll() is not None)
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130
    finally:
        process.kill()
    (told,) = told_in.read_text().splitlines()
    how = "the same command with --resume continues after them"
    assert told == f"interrupted: {_lines_in(output)} lines are in {output}; {how}"


def _job(tiny: str, source: Path, output: Path, *flags: str) -> list[str]:
    """The words of a job; with "auto" it would measure this machine for seconds."""
    return ["batch", str(source), str(output), tiny, *SEEDED, *flags, "-k", "4"]


def _lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--in-order",)])
def test_killed_five_times_at_random_and_resumed_it_is_the_unbroken_run(
    paceline: Any, tiny: str, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    lines = [completion(f"line-{number}", f"text {number}", max_tokens=16) for number in range(400)]
    source, output, whole = write(tmp_path / "in", lines), tmp_path / "out", tmp_path / "whole"
    assert paceline("batch", str(source), str(whole), tiny, *SEEDED).exit_code == 0
    chance = random.Random(os.urandom(8))
    for _ in range(5):
        begun, more = _lines_in(output), chance.randrange(1, 70)
        process = Forked(run_paceline, _job(tiny, source, output, "--resume", *flags))
        wait_until(lambda: _lines_in(output) >= begun + more or process.poll() is not None)  # noqa: B023
        process.kill()
        assert process.wait(20) == -signal.SIGKILL
    assert _lines_in(output) < 400
    assert Forked(run_paceline, _job(tiny, source, output, "--resume", *flags)).wait(300) == 0
    assert set(Counter(entry["custom_id"] for entry in read(output)).values()) == {1}
    assert texts(output) == texts(whole)
    assert not flags or [entry["custom_id"] for entry in read(output)] == [line["custom_id"] for line in lines]
