"""Models on this machine: those in paceline's cache and in the hub's, and the packed copies of their weights."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from paceline.config.aliases import ALIASES, full_name
from paceline.errors import ModelNotFoundError
from paceline.models.files.hub import EMBEDDED, cache_directory, embedded_path

PACKED = "packed"  # folder of the packed copies in the cache
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_BESIDE = ("mmproj", "mtp-")  # how names of files begin that are no models of their own


@dataclass(frozen=True)
class CachedModel:
    """A model in a cache by the name that commands take, or the packed copy of a model's weights by its own.

    files: of the model, links of the hub's cache included. size: bytes on the disk. modified: seconds since the epoch.
    copy_of: path of the model that a packed copy was made from; None for a model.
    """

    name: str
    files: tuple[Path, ...]
    size: int
    modified: float
    copy_of: Path | None = None

    @property
    def short_name(self) -> str:
        """The alias of a hub model, or the name if it has none."""
        alias = next((alias for alias, name in ALIASES.items() if name.lower() == self.name.lower()), self.name)
        return alias if "/" in self.name else self.name


def cached_models() -> list[CachedModel]:
    """Return all models and packed copies in the caches, models first, each kind by name."""
    found = [*_embedded_models(), *_hub_models(), *_packed_copies()]
    return sorted(found, key=lambda model: (model.copy_of is not None, model.short_name.lower()))


def remove(name: str) -> list[CachedModel]:
    """Delete a model with its packed copies, or one packed copy, from the caches. Returns what was deleted.

    name: as ``cached_models`` lists it. Raises ModelNotFoundError if no cache has it.
    """
    known = cached_models()
    wanted = [model for model in known if full_name(name).lower() == model.name.lower()]
    if not wanted:
        elsewhere = Path(name).expanduser().exists()
        why = "it lies outside of the caches; delete its files yourself" if elsewhere else "see `paceline list`"
        raise ModelNotFoundError(f"{name!r} is in no cache: {why}")
    files = {file.resolve() for model in wanted for file in model.files}
    copies = [copy for copy in known if copy.copy_of is not None and _is_of(copy.copy_of, files) and copy not in wanted]
    removed = [*wanted, *copies]
    for model in removed:
        _delete(model.files)
    return removed


def packed_source(path: Path) -> Path | None:
    """Return the path of the model that a packed file was made from; None if the file cannot be read."""
    try:
        with safe_open(str(path), framework="np") as file:
            return Path((file.metadata() or {})["source"])
    except (OSError, SafetensorError, KeyError):
        return None


def _is_of(source: Path, files: Iterable[Path]) -> bool:
    """Whether a model's path is one of these files, or a directory with links to them."""
    inside = source.iterdir() if source.is_dir() else [source]
    return not {path.resolve() for path in inside}.isdisjoint(files)


def _embedded_models() -> Iterator[CachedModel]:
    for name in EMBEDDED:
        path = embedded_path(name)
        if path.is_file():
            yield _cached(name, [path])


def _packed_copies() -> Iterator[CachedModel]:
    for path in (cache_directory() / PACKED).glob("*.safetensors"):
        if (source := packed_source(path)) is not None:
            yield _cached(path.stem, [path], source)


def _cached(name: str, files: Iterable[Path], copy_of: Path | None = None) -> CachedModel:
    """Describe files. One that several links name is counted once."""
    paths = tuple(sorted(files))
    stats = [path.stat() for path in {path.resolve() for path in paths}]
    return CachedModel(name, paths, sum(s.st_size for s in stats), max(s.st_mtime for s in stats), copy_of)


def _hub_models() -> Iterator[CachedModel]:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    for repository in repositories:
        if repository.repo_type == "model":
            for revision in repository.revisions:
                yield from _of_revision(repository.repo_id, revision)


def _of_revision(repository: str, revision: Any) -> Iterator[CachedModel]:
    """The models of a snapshot: of safetensors files one, of GGUF files one a type.

    revision: huggingface_hub's CachedRevisionInfo.
    """
    refs = sorted(revision.refs)
    suffix = "" if "main" in refs else f"@{refs[0] if refs else revision.commit_hash}"
    files = [file.file_path for file in revision.files if file.file_path.exists()]
    of_type: defaultdict[str, list[Path]] = defaultdict(list)
    for path in files:
        if path.suffix == ".gguf" and not path.name.startswith(_BESIDE):
            of_type[re.split("[-.]", _PART.sub("", path.stem))[-1]].append(path)
    for kind, paths in of_type.items():
        yield _cached(f"{repository}:{kind}{suffix}", paths)
    if any(path.suffix == ".safetensors" for path in files):
        yield _cached(f"{repository}{suffix}", [path for path in files if path.suffix != ".gguf"])


def _delete(files: Iterable[Path]) -> None:
    """Delete files, and those that they link to unless other links of their hub folder need them."""
    for path in files:
        target = path.resolve() if path.is_symlink() else None
        path.unlink(missing_ok=True)
        if target is not None and not any(link.resolve() == target for link in _links(path)):
            target.unlink(missing_ok=True)


def _links(path: Path) -> Iterator[Path]:
    """The links of all snapshots in the hub folder of a link that was deleted."""
    snapshots = next(folder for folder in path.parents if folder.name == "snapshots")
    return (link for link in snapshots.rglob("*") if link.is_symlink())
