"""Exceptions that paceline raises.

PacelineError
├── ParameterError (also ValueError)     a parameter is out of range; names the parameter and the range
├── ModelError                           a model cannot be used
│   ├── ModelNotFoundError               unknown name, directory or file (or no network to download it)
│   ├── ModelFormatError                 files are corrupt, truncated or of an unsupported kind
│   ├── NotFiniteError                   its results for one request are NaN or infinite; other requests continue
│   └── VocabularyMismatchError          draft model and target have different vocabularies
├── RequestError                         one request cannot be served; other requests continue
│   ├── EmptyPromptError
│   ├── PromptTooLongError
│   └── StructureError                   the requested structure cannot be enforced
├── ProfileError                         a profile cannot be read, or belongs to another machine or model
├── CapacityError                        the requested rows do not fit into memory
├── RankError                            a process of a tensor-parallel group has ended; the engine has ended, too
├── MissingPackageError                  an optional package is not installed; says how to install it
└── ApiError (server/errors.py)          an HTTP error response
"""

from __future__ import annotations


class PacelineError(Exception):
    """Base class of all exceptions that paceline raises on purpose."""


LONGEST_SHOWN = 200  # maximum length of a value in a message, in characters


def shown(value: object) -> str:
    """Format a value for a message: shortened, on one line and without unpaired surrogates."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 (repr fails for integers of thousands of digits and for broken objects)
        return f"<{type(value).__name__}>"
    if len(text) > LONGEST_SHOWN:
        text = f"{text[: LONGEST_SHOWN // 2]} ... {text[-LONGEST_SHOWN // 2 :]}"
    return " ".join(text.encode(errors="backslashreplace").decode().split())


class ParameterError(PacelineError, ValueError):
    """A parameter is out of range.

    field: name of the parameter. value: the rejected value. allowed: the allowed values, as text.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}={shown(value)} is not allowed: {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


class UnknownParameterError(ParameterError):
    """A parameter does not exist. allowed: what there is instead."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(field, value, allowed)
        self.args = (f"unknown parameter {field}={shown(value)}; {allowed}",)


class ModelError(PacelineError):
    """A model cannot be used."""


class ModelNotFoundError(ModelError):
    """No model has that name, directory or file."""


class ModelFormatError(ModelError):
    """The model's files are corrupt, truncated or of an unsupported kind."""


class NotFiniteError(ModelError):
    """A model's results for one request are NaN or infinite. Other requests are not affected.

    what: the results, with their place in the text. adapter: the request's adapter, or None.
    """

    def __init__(self, what: str, adapter: str | None = None) -> None:
        files = "the model's files" if adapter is None else f"the files of the model and of its adapter {adapter!r}"
        cure = f"if dtype is float16, use 'bfloat16' or 'float32', which do not overflow; otherwise check {files}"
        super().__init__(f"the model's {what} are NaN or infinite: {cure}")


class VocabularyMismatchError(ModelError):
    """Draft model and target have different vocabularies."""


class RequestError(PacelineError):
    """One request cannot be served. Other requests are not affected."""


class EmptyPromptError(RequestError):
    """The prompt has no tokens."""


class PromptTooLongError(RequestError):
    """The prompt does not fit into ``max_model_len``."""


class StructureError(RequestError):
    """The requested structure is invalid, or uses features that cannot be enforced.

    field: the parameter that has the structure, if it is another than the answer's own.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ProfileError(PacelineError):
    """A profile cannot be read, or was measured on another machine or with other models."""


class CapacityError(PacelineError):
    """The requested rows need more memory than is available."""


class RankError(PacelineError):
    """A process of a tensor-parallel group failed. The engine has ended; create a new LLM."""


class MissingPackageError(PacelineError):
    """An optional feature needs a package that is not installed.

    package: name of the missing module. extra: the extra of paceline that installs it.
    """

    def __init__(self, package: str | None, extra: str) -> None:
        name = (package or "").partition(".")[0]  # the missing module may be a submodule
        super().__init__(f'the package {name} is not installed: pip install "paceline[{extra}]"')
