"""``paceline chat``: a conversation grows, mistakes do not end it."""

from collections.abc import Iterator
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.core.outputs import RequestOutput

OPTIONS = ("--temperature", "0", "--max-tokens", "6", "--dtype", "float32", "--quiet", "--ignore-eos")


def test_each_answer_knows_the_turns_before_it(paceline: Any, tiny: str) -> None:
    result = paceline("chat", tiny, "--system", "be brief", *OPTIONS, stdin="hello\nmore\n")
    llm = LLM(tiny, dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    messages = [{"role": "system", "content": "be brief"}]
    expected = ""
    for line in ("hello", "more"):
        messages.append({"role": "user", "content": line})
        answer = llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text
        messages.append({"role": "assistant", "content": answer})
        expected += answer + "\n"
    assert result.exit_code == 0
    assert result.stdout == expected


def test_an_answer_that_ends_in_an_error_is_reported_and_forgotten(
    paceline: Any, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = paceline("chat", tiny, *OPTIONS, stdin="more\n")
    stream, failures = LLM.stream, iter([True, False])

    def failing(llm: LLM, *args: Any, **kwargs: Any) -> Iterator[RequestOutput]:
        fails = next(failures)
        for output in stream(llm, *args, **kwargs):
            if fails and output.finished:
                output.outputs[0].error = ValueError("out of states")
            yield output

    monkeypatch.setattr(LLM, "stream", failing)
    result = paceline("chat", tiny, *OPTIONS, stdin="hello\nmore\n")
    assert "the answer could not be completed: out of states" in result.stderr
    assert result.stdout.endswith("\n" + once.stdout), "the second turn does not see the first"


def test_clear_forgets_and_exit_leaves(paceline: Any, tiny: str) -> None:
    once = paceline("chat", tiny, *OPTIONS, stdin="hello\n")
    twice = paceline("chat", tiny, *OPTIONS, stdin="hello\n/clear\nhello\n/exit\nhello\n")
    assert twice.stdout == 2 * once.stdout


def test_a_turn_that_does_not_fit_is_refused_and_the_conversation_goes_on(paceline: Any, tiny: str) -> None:
    once = paceline("chat", tiny, *OPTIONS, stdin="hello\n")
    result = paceline("chat", tiny, *OPTIONS, stdin="x" * 600 + "\nhello\n")
    assert result.exit_code == 0
    assert result.stdout == once.stdout
    assert result.stderr.startswith("error: the prompt has")


def test_a_line_that_is_no_text_is_refused_and_the_conversation_goes_on(paceline: Any, tiny: str) -> None:
    options = ("--temperature", "0", "--max-tokens", "5", "--ignore-eos", "--quiet", "--dtype", "float32")
    result = paceline("chat", tiny, *options, stdin=b"\xef\xbb\xbfhello\n\xff\xfe\n/clear\nhello\n")
    assert result.exit_code == 0, result.output
    (error,) = result.stderr.splitlines()
    assert "not UTF-8" in error
    first, second = result.stdout.splitlines()
    assert first == second
    assert paceline("chat", tiny, "--system", "\udcff").exit_code == 2


def test_notes_say_what_was_read_before(paceline: Any, tiny: str) -> None:
    options = [option for option in OPTIONS if option != "--quiet"]
    stdin = "a first question that is long enough\nmore\n"
    result = paceline("chat", tiny, *options, stdin=stdin)
    assert ", prefixes reused" in result.stderr
    assert result.stderr.count(" tokens from the cache") == 1, "the second turn's"
    anew = paceline("chat", tiny, "--no-prefix-cache", *options, stdin=stdin)
    assert ", no prefix reuse (prefix_cache=False)" in anew.stderr
    assert " tokens from the cache" not in anew.stderr
    assert anew.stdout == result.stdout
