"""``paceline chat``: a conversation grows, mistakes do not end it."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.core.outputs import RequestOutput
from terminal import run

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
    assert result.stderr.startswith("error: this message is too long: with it the prompt has 6")


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


PROMPT = "\x1b[?2004h"  # the editor asks for pastes in brackets when it is ready
ANSWERED = "rounds"  # a part of the line below each answer


@pytest.fixture
def conversations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The contents of the messages of each prompt that was answered."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    asked, tokens, stream, last = list[list[str]](), LLM.tokens_of_chat, LLM.stream, [""]

    def remembered(llm: LLM, messages: Any, **options: Any) -> list[int]:
        last[:] = [message["content"] for message in messages]
        return tokens(llm, messages, **options)

    def counted(llm: LLM, *args: Any, **options: Any) -> Any:
        asked.append(last[:])
        return stream(llm, *args, **options)

    monkeypatch.setattr(LLM, "tokens_of_chat", remembered)
    monkeypatch.setattr(LLM, "stream", counted)
    return asked


TYPED = [option for option in OPTIONS if option != "--quiet"]


def test_the_line_editor_has_history_arrow_keys_and_several_lines(
    monkeypatch: pytest.MonkeyPatch, tiny: str, conversations: list[list[str]]
) -> None:
    up, left = "\x1b[A", "\x1b[D"
    script = [
        (PROMPT, "hell!" + left + "o\r"), (ANSWERED, ""),
        (PROMPT, "two\x1b\rlines\r"), (ANSWERED, ""),
        (PROMPT, up + up + up + "\r"), (ANSWERED, ""),
        (PROMPT, "\x03"), ("Ctrl-D or /exit leaves", ""),
        (PROMPT, "\x04"),
    ]  # fmt: skip
    code, terminal = run(monkeypatch, "chat", tiny, *TYPED, script=script)
    assert code == 0, terminal.text
    assert [asked[-1] for asked in conversations] == ["hello!", "two\nlines", "hello!"]
    assert "tokens/s" in terminal.text
    assert "the first after" in terminal.text
    history = Path(os.environ["PACELINE_CACHE"]) / "chat_history"
    assert "+lines" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0, "others cannot read it"


@pytest.mark.parametrize(("key", "forgets"), [("\r", True), ("n\r", False)])
def test_a_conversation_that_outgrows_the_context_offers_to_go_on_without_its_beginning(
    monkeypatch: pytest.MonkeyPatch, tiny: str, conversations: list[list[str]], key: str, forgets: bool
) -> None:
    first, second = "a" * 150, "b" * 150
    script = [
        (PROMPT, first + "\r"),
        (ANSWERED, ""),
        (PROMPT, second + "\r"),
        (ANSWERED, ""),
        (PROMPT, "c" * 150 + "\r"),
    ]
    script += [("[Y/n]", key), (ANSWERED if forgets else "not sent", ""), (PROMPT, "\x04")]
    code, terminal = run(monkeypatch, "chat", tiny, *TYPED, script=script, columns=120)
    assert code == 0, terminal.text
    assert "The conversation has outgrown the model's context" in terminal.text
    assert "Forget its first 1 questions with their answers and go on?" in terminal.text
    assert len(conversations) == 2 + forgets
    if forgets:
        assert [text[0] for text in conversations[-1][::2]] == ["b", "c"]


def test_a_conversation_that_outgrows_the_context_is_refused_where_nobody_can_be_asked(
    paceline: Any, tiny: str
) -> None:
    result = paceline("chat", tiny, *OPTIONS, stdin="".join(f"{letter * 150}\n" for letter in "abc"))
    assert result.exit_code == 0
    assert "The conversation has outgrown the model's context" in result.stderr
    assert "/clear begins a new one" in result.stderr


def test_commands_change_sampling_and_the_system_message(
    paceline: Any, tiny: str, conversations: list[list[str]]
) -> None:
    stdin = "/set max_tokens 3\n/system be brief\nhello\n/system\n/clear\nhello\n/set top-p=0.5\n/set\n"
    result = paceline("chat", tiny, *TYPED, stdin=stdin)
    assert conversations == [["be brief", "hello"], ["hello"]]
    assert result.stderr.count("3 tokens in ") == 2
    assert "cut: /set max_tokens 12 allows longer ones" in result.stderr
    assert result.stderr.endswith(2 * "temperature 0.0, max_tokens 3, top_p 0.5, ignore_eos True\n")


def test_regenerate_answers_the_last_message_again_and_a_seed_does_not_repeat_the_answer(
    paceline: Any, tiny: str, conversations: list[list[str]]
) -> None:
    options = ("--seed", "1", "--max-tokens", "6", "--dtype", "float32", "--quiet", "--ignore-eos")
    result = paceline("chat", tiny, *options, stdin="hello\n/regenerate\n/regenerate\nmore\n")
    assert [asked[-1] for asked in conversations] == ["hello", "hello", "hello", "more"]
    answers = [line for line in result.stdout.splitlines() if line]
    assert len(set(answers[:3])) == 3
    assert conversations[-1][1] in result.stdout
    assert conversations[-1][1] == result.stdout.split("\n")[2]


def test_save_writes_what_generate_reads(paceline: Any, tiny: str, tmp_path: Path) -> None:
    file = tmp_path / "talk.jsonl"
    stdin = f"hello\n/save {file}\n/save {file}\n"
    result = paceline("chat", tiny, "--system", "be brief", *OPTIONS, stdin=stdin)
    messages = json.loads(file.read_text())["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert "the name of a new file" in result.stderr
    assert paceline("generate", tiny, "--prompts-file", str(file), *OPTIONS).exit_code == 0


def test_an_unknown_command_or_a_bad_value_is_refused_and_the_conversation_goes_on(paceline: Any, tiny: str) -> None:
    refusals = {
        "/forget": "there is no command /forget: /help lists them",
        "/": "there is no command /:",
        "/set temperature": "temperature='' is not allowed: followed by its value",
        "/set temprature 1": "did you mean temperature?",
        "/set n 2": "one answer a turn",
        "/set top_p 3": "top_p=3",
        "/regenerate": "no answer yet",
    }
    result = paceline("chat", tiny, *OPTIONS, stdin="\n".join([*refusals, "hello", ""]))
    for told, said in zip(result.stderr.splitlines(), refusals.values(), strict=True):
        assert said in told
    assert result.stdout == paceline("chat", tiny, *OPTIONS, stdin="hello\n").stdout


def test_a_message_may_begin_with_a_slash(paceline: Any, tiny: str, conversations: list[list[str]]) -> None:
    result = paceline("chat", tiny, *OPTIONS, stdin="/usr/bin/env: what is it?\n /forget\n/help\n")
    assert [asked[-1] for asked in conversations] == ["/usr/bin/env: what is it?", "/forget"]
    assert "/regenerate" in result.stdout
