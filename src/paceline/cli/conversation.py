"""A conversation of ``paceline chat``: its messages, its commands, and how answers are sampled."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.cli.console import note, report_error, stdout
from paceline.cli.flags import from_text
from paceline.config import SamplingParams
from paceline.config.files import write_text
from paceline.config.ranges import names_of
from paceline.errors import PacelineError, ParameterError, RequestError

if TYPE_CHECKING:
    from paceline.core.outputs import CompletionOutput
    from paceline.llm import LLM

Messages = list[dict[str, str]]
WITHOUT = {"n", "best_of", "rank_by", "logprobs"}  # one answer a turn, as text
HELP = """\
/set                 show how answers are sampled; /set NAME VALUE changes a sampling option:
                     /set temperature 0.3, /set max_tokens 500, /set seed none
/system TEXT         change the system message; without a text: none
/regenerate          answer the last message again
/clear               forget the conversation
/save FILE           write the conversation as JSON, which paceline generate --prompts-file reads
/help                this list
/exit                leave, as Ctrl-D does
Enter sends a message, Alt-Enter begins a new line, the arrow keys find earlier messages, Ctrl-C stops an answer.
A message may begin with a slash after a space."""
_COMMAND = re.compile(r"/\w*")


@dataclass
class Conversation:
    """A conversation and how its answers are sampled.

    system: the system message, if there is one. confirm: asks a person a question; None where there is no person.
    """

    llm: LLM
    params: SamplingParams
    system: str | None
    quiet: bool
    confirm: Callable[[str], bool] | None
    messages: Messages = field(default_factory=list)  # without the system message
    _again: int = 0  # answers to the last message, besides the first one

    def take(self, line: str) -> bool:
        """Answer a message or carry out a command. Returns whether the conversation goes on."""
        word, _, rest = line.strip().partition(" ")
        if not (line.startswith("/") and _COMMAND.fullmatch(word)):
            if line.strip():
                self.say(line.strip())
            return True
        if word == "/exit":
            return False
        try:
            self._carry_out(word, rest.strip())
        except (PacelineError, OSError) as error:
            report_error(error)
        return True

    def _carry_out(self, word: str, rest: str) -> None:
        """Carry out a command. Raises PacelineError or OSError."""
        commands: Mapping[str, Callable[[str], None]] = {
            "/help": lambda _: stdout().print(HELP, markup=False, soft_wrap=True),
            "/set": self._set,
            "/system": self._set_system,
            "/regenerate": self._regenerate,
            "/clear": lambda _: self.messages.clear(),
            "/save": self._save,
        }
        if word not in commands:
            hint = "/help lists them; a message may begin with a slash after a space"
            raise RequestError(f"there is no command {word}: {hint}")
        commands[word](rest)

    def say(self, text: str) -> bool:
        """Answer a message. Returns whether that was possible."""
        self._again = 0
        return self._answer([*self.messages, {"role": "user", "content": text}], self.params)

    def _regenerate(self, _: str) -> None:
        if not self.messages:
            raise RequestError("there is no answer yet to give again")
        self._again += 1
        seed = None if self.params.seed is None else self.params.seed + self._again  # the same one gives the same text
        if self.params.temperature == 0:
            note("at temperature 0 the answer stays the same; /set temperature 0.8 varies it")
        self._answer(self.messages[:-1], replace(self.params, seed=seed))

    def _answer(self, messages: Messages, params: SamplingParams) -> bool:
        """Answer the last message and keep both; an answer that is not possible leaves the conversation as it was."""
        try:
            messages = self._fitting(messages, params)
            prompt = self._tokens(messages)
            self.messages = [*messages, {"role": "assistant", "content": self._stream(prompt, params)}]
        except RequestError as error:
            report_error(error)
            return False
        return True

    def _tokens(self, messages: Messages) -> list[int]:
        start: Messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        return self.llm.tokens_of_chat([*start, *messages])

    def _fitting(self, messages: Messages, params: SamplingParams) -> Messages:
        """The messages, or those that are left where a person agrees to forget the oldest. Raises RequestError."""
        context = self.llm.engine.max_model_len
        tokens = len(self._tokens(messages))
        if tokens < context:
            return messages
        room = min(params.max_tokens, context // 4)  # for the answer
        turns = [place for place, message in enumerate(messages) if message["role"] == "user"]
        left = next((turn for turn in turns[1:] if len(self._tokens(messages[turn:])) + room <= context), None)
        if left is None:
            raise RequestError(
                f"this message is too long: with it the prompt has {tokens} tokens, and the model's context holds "
                f"{context} with the answer; send a shorter one, or start with a larger --max-model-len"
            )
        said = f"The conversation has outgrown the model's context: {tokens} tokens, where {context} fit."
        if self.confirm is None:
            raise RequestError(f"{said} /clear begins a new one")
        if not self.confirm(f"{said}\nForget its first {turns.index(left)} questions with their answers and go on?"):
            raise RequestError("the message was not sent; /clear begins a new conversation")
        return messages[left:]

    def _stream(self, prompt: list[int], params: SamplingParams) -> str:
        """Write the answer as it grows and return it; Ctrl-C ends it and keeps the text so far. Raises RequestError."""
        shown = ""
        try:
            for output in self.llm.stream(prompt, params):
                answer = output.outputs[0]
                typer.echo(answer.text[len(shown) :], nl=False)
                shown = answer.text
            typer.echo()
            if not self.quiet:
                self._note(answer)
        except KeyboardInterrupt:
            typer.echo()
            return shown
        if answer.error is not None:
            raise RequestError(f"the answer could not be completed: {answer.error}") from answer.error
        return shown

    def _note(self, answer: CompletionOutput) -> None:
        """Print what the answer cost, and why it was cut if it was."""
        metrics = answer.metrics
        parts = [f"{metrics.output_tokens} tokens in {metrics.rounds} rounds"]
        if metrics.ms_per_token:
            parts.append(f"{1000 / metrics.ms_per_token:.1f} tokens/s")
        if metrics.time_to_first_token is not None:
            parts.append(f"the first after {metrics.time_to_first_token:.2f} s")
        if metrics.acceptance_rate is not None:
            parts.append(f"{metrics.acceptance_rate:.0%} of the draft tokens accepted")
        if metrics.cached_tokens:
            parts.append(f"{metrics.cached_tokens} of the prompt's {metrics.prompt_tokens} tokens from the cache")
        if answer.finish_reason == "length":
            full = metrics.prompt_tokens + metrics.output_tokens >= self.llm.engine.max_model_len
            most = metrics.output_tokens
            parts.append("cut: the context is full" if full else f"cut: /set max_tokens {4 * most} allows longer ones")
        note(", ".join(parts))

    def _set(self, text: str) -> None:
        """Change a sampling option, and show those that are not at their defaults. Raises ParameterError."""
        if text:
            name, _, value = text.replace("=", " ", 1).partition(" ")
            name = name.strip("-").replace("-", "_")
            if name in WITHOUT:
                raise ParameterError(name, value, "left out: a chat has one answer a turn, as text")
            if not value.strip():
                raise ParameterError(name, value, "followed by its value: /set temperature 0.3")
            self.params = SamplingParams.from_mapping({name: from_text(value.strip())}, self.params)
        usual = SamplingParams()
        changed = [name for name in names_of(SamplingParams) if getattr(self.params, name) != getattr(usual, name)]
        shown = dict.fromkeys(["temperature", "max_tokens", *changed])
        note(", ".join(f"{name} {getattr(self.params, name)}" for name in shown))

    def _set_system(self, text: str) -> None:
        self.system = text or None

    def _save(self, name: str) -> None:
        """Write the conversation to a new file. Raises ParameterError, OSError."""
        path = Path(name).expanduser()
        if not name or path.exists():
            raise ParameterError("/save", name, "the name of a new file")
        start: Messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        write_text(path, json.dumps({"messages": [*start, *self.messages]}, ensure_ascii=False) + "\n")
        note(f"{len(self.messages)} messages are in {path}")
