"""What the caches hold is listed by the names that commands take, and deleted without breaking what is left."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paceline.config.aliases import ALIASES, full_name
from paceline.errors import ModelNotFoundError
from paceline.models.files import hub
from paceline.models.files.cached import PACKED, cached_models, packed_source, remove

COMMIT, OTHER = "0123456789abcdef0123456789abcdef01234567", "1" * 40


def put(repository: Path, commit: str, name: str, content: bytes) -> Path:
    """Put a file into a hub folder as huggingface_hub does: a blob, and a link to it in the snapshot."""
    blob = repository / "blobs" / f"{len(content)}-{content[:8].hex()}"
    link = repository / "snapshots" / commit / name
    for path in (blob, link):
        path.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    link.symlink_to(blob)
    return link


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with a repository of GGUF files in two revisions and one of safetensors, and paceline's own cache."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "own"))
    gguf, plain = (tmp_path / "hub" / f"models--{name}" for name in ("Qwen--Qwen3-0.6B-GGUF", "org--plain"))
    source = put(gguf, COMMIT, "Qwen3-0.6B-Q8_0.gguf", b"q8" * 500)
    put(gguf, COMMIT, "Qwen3-0.6B-Q4_K_M-00001-of-00002.gguf", b"first" * 10)
    put(gguf, COMMIT, "Qwen3-0.6B-Q4_K_M-00002-of-00002.gguf", b"second" * 10)
    put(gguf, COMMIT, "mmproj-F16.gguf", b"beside")
    put(gguf, OTHER, "Qwen3-0.6B-Q8_0.gguf", b"q8" * 500)
    put(plain, COMMIT, "model.safetensors", b"weights")
    put(plain, COMMIT, "config.json", b"{}")
    for repository in (gguf, plain):
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(COMMIT)
    embedded = hub.embedded_path("smollm2-135m")
    embedded.parent.mkdir(parents=True)
    embedded.write_bytes(b"G" * 7)
    (tmp_path / "own" / PACKED).mkdir()
    for name, of in (("blob-int8-1", source.resolve()), ("mine-int8-2", tmp_path / "mine.gguf")):
        save_file({"t": torch.zeros(3)}, tmp_path / "own" / PACKED / f"{name}.safetensors", {"source": str(of)})
    (tmp_path / "own" / PACKED / "broken.safetensors").write_bytes(b"no header")
    return tmp_path


def names() -> list[str]:
    return [model.short_name for model in cached_models()]


def test_all_models_and_copies_are_listed(caches: Path) -> None:
    sizes = {model.short_name: model.size for model in cached_models() if model.copy_of is None}
    assert sizes == {
        "org/plain": 9,
        "Qwen/Qwen3-0.6B-GGUF:Q4_K_M": 110,
        f"Qwen/Qwen3-0.6B-GGUF:Q8_0@{OTHER}": 1000,
        "qwen3:0.6b": 1000,
        "smollm2-135m": 7,
    }
    assert names()[-2:] == ["blob-int8-1", "mine-int8-2"]
    assert packed_source(caches / "own" / PACKED / "broken.safetensors") is None


def test_a_model_goes_with_its_copies_and_what_others_need_stays(caches: Path) -> None:
    other = caches / "hub/models--Qwen--Qwen3-0.6B-GGUF/snapshots" / OTHER / "Qwen3-0.6B-Q8_0.gguf"
    assert [model.name for model in remove("qwen3:0.6b")] == ["Qwen/Qwen3-0.6B-GGUF:Q8_0", "blob-int8-1"]
    assert other.read_bytes() == b"q8" * 500, "another revision has the same file"
    remove(f"Qwen/Qwen3-0.6B-GGUF:Q8_0@{OTHER}")
    remove("Qwen/Qwen3-0.6B-GGUF:Q4_K_M")
    remove("org/plain")
    assert names() == ["smollm2-135m", "mine-int8-2"]
    blobs = [path.read_bytes() for path in (caches / "hub").rglob("blobs/*")]
    assert blobs == [b"beside"]
    remove("smollm2:135m")
    remove("mine-int8-2")
    assert names() == []
    with pytest.raises(ModelNotFoundError, match="outside of the caches"):
        remove(str(caches))


def test_aliases_name_packaged_models_and_hub_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for alias, name in ALIASES.items():
        assert alias == alias.lower()
        match = hub.HUB_NAME.fullmatch(name)
        assert name in hub.EMBEDDED or (match is not None and match["type"]), alias
        assert not hub.HUB_NAME.fullmatch(alias), "a hub name would never be looked up"
    assert full_name("Qwen3:0.6B") == "Qwen/Qwen3-0.6B-GGUF:Q8_0"
    asked: list[str] = []
    monkeypatch.setattr(hub, "_hub_model", lambda name: asked.append(name) or Path("/hub"))
    for find in (hub.resolve, hub.resolve_tokenizer, hub.pull):
        assert find("qwen3:4b") == Path("/hub")
    assert asked == ["Qwen/Qwen3-4B-GGUF:Q4_K_M"] * 3
    with pytest.raises(ModelNotFoundError, match=re.escape("did you mean 'qwen3:14b'?")):
        hub.resolve("qwen3:140b")
