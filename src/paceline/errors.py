"""Every error that paceline raises on purpose.

PacelineError
├── ParameterError (also ValueError)     a parameter is outside its range; names the field and the range
├── ModelError                           something is wrong with a model
│   ├── ModelNotFoundError               no such name, directory or file (or no network to fetch it)
│   ├── ModelFormatError                 the files are there but broken, truncated or of an unknown kind
│   └── VocabularyMismatchError          draft and target do not speak the same tokens
├── RequestError                         one request cannot be served; the others go on
│   ├── EmptyPromptError
│   ├── PromptTooLongError
│   └── StructureError                   answers cannot be held to the structure asked for
├── ProfileError                         a profile cannot be read, or is of another machine or model
├── CapacityError                        the rows asked for do not fit into memory
├── RankError                            a process that shares the model has ended, and the engine with it
├── MissingPackageError                  an optional package is not installed; says how to get it
└── ApiError (server/errors.py)          an HTTP answer that is no success
"""

from __future__ import annotations


class PacelineError(Exception):
    """The root: catch this to catch everything paceline raises on purpose."""


LONGEST_SHOWN = 200  # characters of a value in a message


def shown(value: object) -> str:
    """A value as messages show it: of any value, however long, on one line, and without half characters."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 (of a number of thousands of digits, or of an object that is broken)
        return f"<{type(value).__name__}>"
    if len(text) > LONGEST_SHOWN:
        text = f"{text[: LONGEST_SHOWN // 2]} ... {text[-LONGEST_SHOWN // 2 :]}"
    return " ".join(text.encode(errors="backslashreplace").decode().split())


class ParameterError(PacelineError, ValueError):
    """A parameter is outside its allowed range."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}={shown(value)} is not allowed: {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


class ModelError(PacelineError):
    """Something is wrong with a model."""


class ModelNotFoundError(ModelError):
    """No model of that name, directory or file."""


class ModelFormatError(ModelError):
    """The model's files are broken, truncated or of a kind that cannot be run."""


class VocabularyMismatchError(ModelError):
    """Draft model and target do not share a vocabulary."""


class RequestError(PacelineError):
    """One request cannot be served; the others are not affected."""


class EmptyPromptError(RequestError):
    """The prompt has no tokens."""


class PromptTooLongError(RequestError):
    """The prompt does not fit into ``max_model_len``."""


class StructureError(RequestError):
    """Answers cannot be held to the structure asked for: it is broken, or says what cannot be enforced."""


class ProfileError(PacelineError):
    """A profile that cannot be read, or that was measured on another machine or with other models."""


class CapacityError(PacelineError):
    """The rows asked for need more memory than there is."""


class RankError(PacelineError):
    """The processes that share a model cannot go on together; the engine has ended, and a new LLM is needed."""


class MissingPackageError(PacelineError):
    """Something optional was asked for, and a package that it needs is not installed."""

    def __init__(self, package: str | None, extra: str) -> None:
        name = (package or "").partition(".")[0]  # what was looked for may be a part of it
        super().__init__(f'the package {name} is not installed: pip install "paceline[{extra}]"')
