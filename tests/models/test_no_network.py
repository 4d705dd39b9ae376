"""Loading a local model sends no network request."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import gguf
import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import real_models
from gguf_support import finish
from model_support import FOREIGN, NATIVE, tiny
from paceline import LLM, SamplingParams
from paceline.errors import ModelFormatError
from paceline.models.files import hub
from paceline.models.files.boundary import reading
from paceline.models.load.loading import eos_token_ids, load_config, load_model, max_positions
from paceline.models.text.tokenizer import Tokenizer

LARGE = 100_500  # tokens: from 100,000 on, transformers looks up on the hub where a tokenizer comes from
SHAPE = {"vocab_size": LARGE, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4}


def letters() -> list[str]:
    """Return a byte-level vocabulary of LARGE tokens."""
    return [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"t{n}" for n in range(LARGE - 256))]


@pytest.fixture(scope="module")
def models_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models with large vocabularies: ``gguf/large.gguf``, and directories ``native`` and ``foreign``."""
    root = tmp_path_factory.mktemp("models")
    write_gguf(root / "gguf" / "large.gguf")
    for name, (kind, fields) in {
        "native": NATIVE["qwen2"],
        "foreign": FOREIGN["cohere with norms of queries and keys"],
    }.items():
        tiny(kind, fields | SHAPE).save_pretrained(root / name)
        backend = Backend(models.BPE(vocab={token: index for index, token in enumerate(letters())}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(root / name)
        config = json.loads((root / name / "config.json").read_text())
        (root / name / "config.json").write_text(json.dumps(config | {"transformers_version": "4.50.0"}))
    return root


def write_gguf(path: Path) -> None:
    path.parent.mkdir()
    writer = gguf.GGUFWriter(path, "qwen2")
    for add, value in (
        (writer.add_context_length, 64),
        (writer.add_block_count, 1),
        (writer.add_embedding_length, 8),
        (writer.add_feed_forward_length, 8),
        (writer.add_head_count, 2),
        (writer.add_tokenizer_model, "gpt2"),
        (writer.add_tokenizer_pre, "qwen2"),
        (writer.add_token_list, letters()),
        (writer.add_token_merges, ["t 1"]),
        (writer.add_eos_token_id, 0),
    ):
        add(value)
    shapes = {"token_embd.weight": (LARGE, 8), "output_norm.weight": (8,)}
    shapes |= {f"blk.0.attn_{part}.weight": (8, 8) for part in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.attn_{part}.bias": (8,) for part in ("q", "k", "v")}
    shapes |= {f"blk.0.ffn_{part}.weight": (8, 8) for part in ("gate", "up", "down")}
    shapes |= {f"blk.0.{norm}_norm.weight": (8,) for norm in ("attn", "ffn")}
    for name, shape in shapes.items():
        writer.add_tensor(name, torch.ones(shape).numpy())
    finish(writer)


@pytest.mark.parametrize(
    ("name", "absolute"), [("gguf/large.gguf", True), ("gguf/large.gguf", False), ("native", False), ("foreign", True)]
)
def test_loading_a_local_model_sends_no_request(
    name: str, absolute: bool, models_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(models_folder)
    source = models_folder / name if absolute else Path(name)
    if not absolute and source.is_dir():
        monkeypatch.chdir(models_folder.parent)
        source = Path(models_folder.name) / name
    assert Tokenizer.load(source).vocab_size >= LARGE
    assert load_config(source).vocab_size == LARGE
    assert max_positions(source) == 64
    assert len(eos_token_ids(source)) == 1
    assert load_model(source, dtype=torch.float32).vocab_size == LARGE


def test_a_whole_llm_with_a_draft_model_sends_no_request(models_folder: Path) -> None:
    options = {"device": "cpu", "max_model_len": 32, "max_batch_size": 1}
    llm = LLM(models_folder / "gguf" / "large.gguf", models_folder / "gguf" / "large.gguf", **options)
    llm.generate("a", SamplingParams(max_tokens=3), use_tqdm=False)


@pytest.mark.parametrize(
    "field", [{"model_type": "detr", "backbone": "acme/eye", "use_timm_backbone": False}, {"_name_or_path": "acme/x"}]
)
def test_a_configuration_that_names_another_model_sends_no_request(
    field: dict[str, object], models_folder: Path, tmp_path: Path
) -> None:
    config = json.loads((models_folder / "native" / "config.json").read_text()) | field
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "acme/base"}')
    for load in (Tokenizer.load, lambda source: load_model(source, dtype=torch.float32)):
        with pytest.raises(ModelFormatError, match=tmp_path.name):
            load(tmp_path)


def test_the_hub_is_allowed_again_after_reading() -> None:
    before, during = huggingface_hub.is_offline_mode(), []

    def fail() -> None:
        with reading("here"):
            during.append(huggingface_hub.is_offline_mode())
            raise ValueError("nothing")

    with pytest.raises(ModelFormatError, match="here cannot be used: nothing"):
        fail()
    assert [*during, huggingface_hub.is_offline_mode()] == [True, before]


def test_fetches_wait_until_reading_is_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    offline: list[bool] = []

    def fetch(*_: object, **__: object) -> str:
        offline.append(huggingface_hub.is_offline_mode())
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    thread = threading.Thread(target=hub._try_snapshot, args=("acme/little",), kwargs={"local": False})
    with hub.no_network():
        thread.start()
        thread.join(0.05)
        assert offline == []
    thread.join(10)
    assert offline == [False]


def test_a_tokenizer_loads_in_offline_mode(models_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert Tokenizer.load(models_folder / "gguf" / "large.gguf").vocab_size == LARGE


# In subprocesses


LOAD = "import sys; from paceline.models.text.tokenizer import Tokenizer; print(Tokenizer.load(sys.argv[1]).vocab_size)"


def load_elsewhere(source: Path, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(source)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_a_tokenizer_loads_in_a_process_in_offline_mode(models_folder: Path) -> None:
    assert load_elsewhere(Path("gguf/large.gguf"), models_folder, HF_HUB_OFFLINE="1") == str(LARGE)


@pytest.mark.slow
def test_an_endpoint_that_never_answers_is_never_called(models_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert load_elsewhere(Path("gguf/large.gguf"), models_folder, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0") == str(
            LARGE
        )
        with pytest.raises(BlockingIOError):
            silent.accept()


def test_a_real_model_with_a_large_vocabulary_needs_no_network() -> None:
    path = real_models.find("qwen-coder-0.5b")
    started = time.perf_counter()
    assert Tokenizer.load(path).encode("def f(x):") == [750, 282, 2075, 1648]
    assert time.perf_counter() - started < 60
