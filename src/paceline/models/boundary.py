"""The edge to the libraries that read models: nothing goes out from behind it, and what they raise becomes our words.

transformers, tokenizers, safetensors and gguf read files that anybody may have written. They raise errors of any kind,
and some of them ask the hub about a model that lies on this disk, whatever they were told. Whoever calls them for a
model does so inside of ``reading``.
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
from paceline.models.hub import no_network, resolve

if TYPE_CHECKING:  # their class brings a compiler and a distributed runtime along: as much again as torch
    from transformers import PreTrainedModel
    from typing_extensions import TypeIs

P = ParamSpec("P")
R = TypeVar("R")
Source: TypeAlias = "str | os.PathLike[str] | PreTrainedModel"
"""A directory, a .gguf file, an embedded or hub name, or a loaded Hugging Face model."""
Found: TypeAlias = "Path | PreTrainedModel"

LONGEST_REASON = 400  # characters of another library's message that are passed on
LONGEST = 1000  # of a whole message: a file may give a name of any length to what is wrong
_NO_MEMORY = ("not enough memory", "annot allocate", "an't allocate", "nable to allocate", "out of memory")


def reads_model(function: Callable[Concatenate[Found, P], R]) -> Callable[Concatenate[Source, P], R]:
    """Takes a source, finds it (fetching may use the network), then calls the function inside of ``reading``."""

    @functools.wraps(function)
    def guarded(source: Source, /, *args: P.args, **kwargs: P.kwargs) -> R:
        found = source if is_loaded(source) else resolve(source)
        with reading(found if isinstance(found, Path) else name_of(found)):
            return function(found, *args, **kwargs)

    return guarded


def is_loaded(source: object) -> TypeIs[PreTrainedModel]:
    """Whether it is a loaded model of transformers'. Nobody has one who has not imported its class."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(source, modeling.PreTrainedModel)


def name_of(model: PreTrainedModel) -> str:
    """Where a loaded model came from, else its class."""
    return str(model.config.name_or_path or type(model).__name__)


@contextmanager
def reading(model: str | Path, failing: str = "cannot be used") -> Iterator[None]:
    """Read a model's files in here. model: its path or name, failing: what is wrong with it then, for messages.

    Raises ModelFormatError, or CapacityError where memory ended, for whatever a library raises; each names the model.
    """
    try:
        with no_network():
            yield
    except ModelFormatError as error:
        said, named = str(error), Path(model).name in str(error)
        if named and len(said) <= LONGEST:
            raise
        raise ModelFormatError(brief(said if named else f"{model}: {said}", LONGEST)) from error
    except PacelineError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":  # Rust's, which is no Exception
            raise _as_ours(error, f"{model} {failing}") from error
        raise


def _as_ours(error: BaseException, start: str) -> PacelineError:
    said = brief(error)
    if isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY):
        return CapacityError(f"{start}: there is not enough memory ({said})")
    kind = "" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: "
    return ModelFormatError(f"{start}: {kind}{said}")


def brief(error: object, longest: int = LONGEST_REASON) -> str:
    """An error in one line of bounded length: somebody else's words may be pages."""
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= longest else f"{words[: longest - 4].rstrip()} ..."
