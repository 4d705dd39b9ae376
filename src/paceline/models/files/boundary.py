"""Guard around the libraries that read models: no network access, and their errors become paceline's errors.

transformers, tokenizers, safetensors and gguf read untrusted files. They raise errors of any kind, and some of them ask
the hub about a local model even when told not to. All calls into them for a model go through ``reading``.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeAlias, TypeVar

from paceline.errors import CapacityError, ModelFormatError, PacelineError
from paceline.models.files.hub import no_network, resolve

if TYPE_CHECKING:  # importing PreTrainedModel takes as long as importing torch
    from transformers import PreTrainedModel
    from typing_extensions import TypeIs

P = ParamSpec("P")
R = TypeVar("R")
Source: TypeAlias = "str | os.PathLike[str] | PreTrainedModel"
"""A directory, a .gguf file, an embedded or hub name, or a loaded Hugging Face model."""
ResolvedSource: TypeAlias = "Path | PreTrainedModel"

LONGEST_REASON = 400  # characters of another library's message that are passed on
LONGEST = 1000  # characters of a whole message: names in a file may have any length
_NO_MEMORY = ("not enough memory", "annot allocate", "an't allocate", "nable to allocate", "out of memory")


def reads_model(function: Callable[Concatenate[ResolvedSource, P], R]) -> Callable[Concatenate[Source, P], R]:
    """Decorate a function of a resolved source, so that it takes any source.

    The source is resolved first, which may use the network. The function then runs inside ``reading``.
    """

    @functools.wraps(function)
    def guarded(source: Source, /, *args: P.args, **kwargs: P.kwargs) -> R:
        found = source if is_loaded(source) else resolve(source)
        with reading(name_of(found)):
            return function(found, *args, **kwargs)

    return guarded


def is_loaded(source: object) -> TypeIs[PreTrainedModel]:
    """Whether ``source`` is a loaded transformers model. Does not import transformers: a loaded model implies it."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(source, modeling.PreTrainedModel)


def name_of(source: Source) -> str:
    """Return the name of a source; of a loaded model its path or hub name, or its class name if it has none."""
    return str(source.config.name_or_path or type(source).__name__) if is_loaded(source) else os.fspath(source)


@contextmanager
def reading(model: str | Path, failing: str = "cannot be used") -> Iterator[None]:
    """Context in which a model's files are read: without network, and with library errors converted.

    model: path or name for messages. failing: predicate of the message, such as "cannot be used".
    Raises ModelFormatError for any exception of a library, or CapacityError if memory ran out. The message names the
    model.
    """
    try:
        with no_network():
            yield
    except ModelFormatError as error:
        message, named = str(error), Path(model).name in str(error)
        if named and len(message) <= LONGEST:
            raise
        raise ModelFormatError(brief(message if named else f"{model}: {message}", LONGEST)) from error
    except PacelineError:
        raise
    except BaseException as error:
        if is_failure(error):
            raise _converted(error, f"{model} {failing}") from error
        raise


def is_failure(error: BaseException) -> bool:
    """Whether an exception is a library's error, and not an interrupt. Panics of Rust are BaseExceptions."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _converted(error: BaseException, start: str) -> PacelineError:
    reason = brief(error)
    if isinstance(error, MemoryError) or any(phrase in str(error) for phrase in _NO_MEMORY):
        return CapacityError(f"{start}: there is not enough memory ({reason})")
    kind = "" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: "
    return ModelFormatError(f"{start}: {kind}{reason}")


def brief(error: object, longest: int = LONGEST_REASON) -> str:
    """Return an error message as one line of at most ``longest`` characters."""
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= longest else f"{words[: longest - 4].rstrip()} ..."
