"""Drafters and length policies by name; other packages may add some.

paceline's own are listed here; other packages add theirs by entry points. ``module:Class`` and ``path.py:Class`` name
one without either. A part is imported when its name is used.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast, runtime_checkable

from paceline.config.ranges import check
from paceline.errors import ParameterError


@runtime_checkable
class DrafterKind(Protocol):
    """Requirements of a drafter, known before anything is loaded; see ``drafters.base.Drafter``.

    needs_draft_model: whether it runs a draft model. copies: whether it copies draft tokens from references, documents
    and parallel samples. auto_width: draft tokens side by side where ``speculation_width`` is "auto"; 0: chains only.
    """

    @property
    def name(self) -> str: ...

    @property
    def needs_draft_model(self) -> bool: ...

    @property
    def copies(self) -> bool: ...

    @property
    def auto_width(self) -> int: ...

    def build(self, equipment: Any, /) -> Any:
        """The drafter of one engine. equipment: ``drafters.base.Equipment``."""
        ...


@runtime_checkable
class LengthKind(Protocol):
    """Requirements of a length policy; see ``lengths.base.LengthPolicy``.

    needs_profile: whether it requires a profile. reads_profile: whether it uses one. max_draft_tokens: its maximum for
    a row in a round.
    """

    @property
    def name(self) -> str: ...

    @property
    def needs_profile(self) -> bool: ...

    @property
    def reads_profile(self) -> bool: ...

    @property
    def max_draft_tokens(self) -> int: ...

    def build(self, means: Any, /) -> Any:
        """The length policy of one engine. means: ``lengths.base.PolicyInputs``."""
        ...


Kind = TypeVar("Kind", DrafterKind, LengthKind)
_PLACE = re.compile(r"(?P<module>[A-Za-z_][\w.]*|.+\.py):(?P<name>[A-Za-z_]\w*)")


@cache  # a class must stay the same object, however often it is named
def _object_at(place: str) -> Any:
    """The object that ``module:name`` or ``path.py:name`` names. Raises what importing it raises."""
    match = _PLACE.fullmatch(place)
    assert match is not None, "Registry.take has looked"
    module, name = match["module"], match["name"]
    if not module.endswith(".py"):
        return getattr(importlib.import_module(module), name)
    path = Path(module).expanduser().resolve()
    title = f"paceline_file_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(title, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    made = sys.modules[title] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(made)
    return getattr(made, name)


@dataclass(frozen=True, eq=False)
class Registry(Generic[Kind]):
    """Kinds by name; as a rule (``ranges.Rule``) it takes a name, or an object of the kind.

    field: the option that they are given as. kind: what an object must be; what: how errors call one. group: of entry
    points. own: where ours are, "module:object". words: what else may be said in place of a name.
    """

    field: str
    kind: type
    what: str
    group: str
    own: Mapping[str, str]
    words: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Ours first; reads the installed packages' metadata."""
        names: set[str] = set(entry_points(group=self.group).names)
        return (*self.own, *sorted(names - self.own.keys()))

    @property
    def allowed(self) -> str:
        named = ", ".join(map(repr, (*self.words, *self.names)))
        return (
            f"one of {named} (a package adds to them by an entry point in {self.group}), the place of one as "
            f"module:Class or path.py:Class, or {self.what}"
        )

    def take(self, name: str, value: Any) -> Any:
        if isinstance(value, str):
            known = value in self.words or value in self.own or _PLACE.fullmatch(value) or value in self.names
        else:
            known = isinstance(value, self.kind)
        if not known:  # ``allowed`` is made for errors only: it reads all installed packages' metadata
            raise ParameterError(name, value, self.allowed)
        return value

    def get(self, given: str | Kind) -> Kind:
        """The kind of that name; an object is returned as it is. Raises ParameterError."""
        return self._load(given) if isinstance(given, str) else given

    def _load(self, name: str) -> Kind:
        try:
            loaded = _object_at(name) if _PLACE.fullmatch(name) else self._place(name).load()
        except ParameterError:
            raise
        except Exception as error:  # an import of another package may raise anything
            allowed = f"a name whose package or file can be imported: {type(error).__name__}: {error}"
            raise ParameterError(self.field, name, allowed) from error
        check(isinstance(loaded, self.kind), self.field, name, f"{self.what}; what it names is something else")
        return cast(Kind, loaded)

    def _place(self, name: str) -> EntryPoint:
        if name in self.own:
            return EntryPoint(name, self.own[name], self.group)
        places = {place.value: place for place in entry_points(group=self.group, name=name)}
        check(len(places) > 0, self.field, name, self.allowed)
        check(len(places) == 1, self.field, name, f"a name that only one package adds, not several: {sorted(places)}")
        (place,) = places.values()
        return place


DRAFTERS: Registry[DrafterKind] = Registry(
    "drafter",
    DrafterKind,
    "a subclass of paceline.drafters.Drafter",
    "paceline.drafters",
    {
        "model": "paceline.drafters.model:ModelDrafter",
        "ngram": "paceline.drafters.ngram:NgramDrafter",
        "hybrid": "paceline.drafters.hybrid:HybridDrafter",
        "feature": "paceline.drafters.feature:FeatureDrafter",
        "mtp": "paceline.drafters.feature:MtpDrafter",
    },
    words=("auto",),
)

LENGTHS: Registry[LengthKind] = Registry(
    "num_speculative_tokens",
    LengthKind,
    "a paceline.lengths.LengthPolicy",
    "paceline.lengths",
    {
        "auto": "paceline.lengths.auto:AutoLength",
        "bass": "paceline.lengths.base:BassLength",
        "profiled": "paceline.lengths.base:ProfiledLength",
    },
)
