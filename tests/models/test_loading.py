import json
import os
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from gguf_support import begun, finish
from model_support import FOREIGN, NATIVE, VOCABULARY, Runner, random_tokens, tiny
from paceline import LLM
from paceline.drafters.heads.loading import has_own_head
from paceline.errors import ModelFormatError, ModelNotFoundError
from paceline.models.base import Model
from paceline.models.families import describe
from paceline.models.files import hub
from paceline.models.files.gguf import GGUFFile
from paceline.models.files.safetensors import open_safetensors
from paceline.models.load.loading import _unpacked_config, eos_token_ids, load_config, load_model, max_positions
from paceline.models.text import gguf_tokenizer
from paceline.models.text.tokenizer import Tokenizer
from paceline.models.torch.huggingface import HuggingFaceModel
from paceline.models.torch.transformer import Transformer
from recurrent_support import tiny_nemotron
from server_support import byte_tokenizer

FAMILIES = ["llama", "llama with tied embeddings", "mistral with a window", "qwen2", "qwen3", "opt", "gpt2"]


@torch.no_grad()
def _logits(model: Model, length: int = 10) -> torch.Tensor:
    tokens = random_tokens(1, length)
    return Runner(model, 1)(tokens, torch.arange(length)[None])


@torch.no_grad()
def _expected(model: PreTrainedModel, length: int = 10) -> torch.Tensor:
    return model(random_tokens(1, length)).logits.float()


def _load(path: Path, dtype: torch.dtype = torch.float32) -> Model:
    return load_model(path, dtype=dtype)


# Directories


@pytest.mark.parametrize("name", [*FAMILIES, "opt with norms after"])
@pytest.mark.parametrize("shards", ["one file", "shards"])
def test_a_saved_model_gives_the_logits_of_transformers(name: str, shards: str, tmp_path: Path) -> None:
    theirs = tiny(*NATIVE[name])
    theirs.save_pretrained(tmp_path, max_shard_size="20KB" if shards == "shards" else "1GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards == "shards")
    ours = _load(tmp_path)
    assert isinstance(ours, Transformer)
    assert (_logits(ours) - _expected(theirs)).abs().max() < 1e-3
    assert ours.weight_bytes() == sum(parameter.nbytes for parameter in theirs.parameters())


def test_another_family_runs_through_transformers(tmp_path: Path) -> None:
    theirs = tiny(*FOREIGN["gpt_neox"])
    theirs.save_pretrained(tmp_path)
    ours = _load(tmp_path)
    assert isinstance(ours, HuggingFaceModel)
    assert (_logits(ours) - _expected(theirs)).abs().max() < 1e-3


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 0.3), (torch.float16, 0.04)])
def test_weights_are_loaded_in_the_requested_dtype(dtype: torch.dtype, error: float, tmp_path: Path) -> None:
    tiny(*NATIVE["llama"]).save_pretrained(tmp_path)
    half = _load(tmp_path, dtype)
    assert half.dtype == dtype
    assert half.weight_bytes() * 2 == _load(tmp_path).weight_bytes()
    assert (_logits(half) - _logits(_load(tmp_path))).abs().max() < error


def test_weights_that_float16_cannot_hold_are_refused(tmp_path: Path) -> None:
    theirs = tiny(*NATIVE["llama"])
    with torch.no_grad():
        theirs.model.norm.weight[3] = 7e4
    theirs.save_pretrained(tmp_path)
    assert _load(tmp_path, torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(ModelFormatError, match=r"norm.weight has values beyond float16.*dtype='float32'"):
        _load(tmp_path, torch.float16)


@pytest.mark.parametrize(("name", "prefix"), [("llama", "model."), ("opt", "model."), ("gpt2", "transformer.")])
def test_files_of_a_decoder_without_prefix_are_loaded(name: str, prefix: str, tmp_path: Path) -> None:
    theirs = tiny(*NATIVE[name])
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({key.removeprefix(prefix): value for key, value in load_file(file).items()}, file)
    assert (_logits(_load(tmp_path)) - _expected(theirs)).abs().max() < 1e-3


def test_a_head_that_differs_from_the_embedding_is_not_tied(tmp_path: Path) -> None:
    theirs = tiny(*NATIVE["llama"])
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert (_logits(_load(tmp_path)) - _expected(theirs)).abs().max() < 1e-3


def test_a_head_stored_without_embedding_is_used_for_both(tmp_path: Path) -> None:
    theirs = tiny(*NATIVE["llama with tied embeddings"])
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, file)
    assert (_logits(_load(tmp_path)) - _expected(theirs)).abs().max() < 1e-3


def test_known_buffers_are_ignored(tmp_path: Path) -> None:
    theirs = tiny(*NATIVE["gpt2"])
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    buffers = {f"transformer.h.{i}.attn.{name}": torch.ones(1) for i in range(3) for name in ("bias", "masked_bias")}
    save_file(load_file(file) | buffers, file)
    assert (_logits(_load(tmp_path)) - _expected(theirs)).abs().max() < 1e-3


_MISSING, _EXTRA = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.side_proj.weight"


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (tiny_nemotron, "mtp.layers.0.eh_proj.weight"),
        (partial(tiny, *NATIVE["mimo_v2_flash"]), "model.mtp.layers.2.eh_proj.weight"),
    ],
)
def test_draft_heads_of_which_transformers_has_no_code_are_ignored(
    make: Callable[[], PreTrainedModel], name: str, tmp_path: Path
) -> None:
    make().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), name: torch.zeros(4, 8)}, file, metadata={"format": "pt"})
    assert isinstance(load_model(tmp_path, dtype=torch.float32), Transformer)
    assert not has_own_head(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop(_MISSING), r"misses the weights layers\.1\.up\.weight"),
        (lambda weights: weights.update({_EXTRA: torch.ones(1)}), rf"has no use for the weights {_EXTRA}"),
        (lambda weights: weights.update({_MISSING: torch.ones(3, 24)}), r"has the shape \(3, 24\)"),
        (
            lambda weights: weights.update({_MISSING.removeprefix("model."): weights[_MISSING] + 1}),
            r"layers\.1\.mlp\.up_proj\.weight are the same weight under two names",
        ),
    ],
)
def test_weights_must_fit_the_model_one_to_one(change, message: str, tmp_path: Path) -> None:
    tiny(*NATIVE["llama"]).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file)
    with pytest.raises(ModelFormatError, match=message):
        _load(tmp_path)


def test_missing_weights_of_another_family_are_refused(tmp_path: Path) -> None:
    tiny(*FOREIGN["gpt_neox"]).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights.pop("gpt_neox.layers.1.mlp.dense_h_to_4h.weight")
    save_file(weights, file)
    with pytest.raises(ModelFormatError, match="dense_h_to_4h"):
        _load(tmp_path)


@pytest.mark.parametrize(("scheme", "is_native"), [("gguf", True), ("bitsandbytes", False)])
def test_plain_weights_that_transformers_made_of_a_gguf_file_run_natively(scheme: str, is_native: bool) -> None:
    theirs = tiny(*NATIVE["llama"])
    theirs.config.quantization_config = SimpleNamespace(quant_method=scheme)
    assert isinstance(load_model(theirs, dtype=torch.float32), Transformer) is is_native
    assert theirs.config.quantization_config.quant_method == scheme
    theirs.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(torch.zeros(4, 4).to(torch.uint8), False)
    assert describe(_unpacked_config(theirs)) is None, "packed weights are run by transformers"


def test_a_model_that_transformers_would_adapt_by_itself_is_refused(tmp_path: Path) -> None:
    tiny(*FOREIGN["gpt_neox"]).save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1}')
    with pytest.raises(ModelFormatError, match=r"adapter_config\.json"):
        _load(tmp_path)


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
@pytest.mark.parametrize("keep", [0, 7, 300, -5])
def test_a_truncated_file_is_named(name: str, keep: int, tmp_path: Path) -> None:
    tiny(*(NATIVE | FOREIGN)[name]).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelFormatError, match=r"model\.safetensors"):
        _load(tmp_path)


def test_other_safetensors_files_beside_model_safetensors_are_ignored(tmp_path: Path) -> None:
    theirs = tiny(*NATIVE["llama"])
    theirs.save_pretrained(tmp_path)
    save_file({"vision.weight": torch.ones(3)}, tmp_path / "adapter.safetensors")
    save_file({"norm.weight": torch.ones(3)}, tmp_path / "consolidated.safetensors")
    assert (_logits(_load(tmp_path)) - _expected(theirs)).abs().max() < 1e-3


def test_several_files_without_an_index_are_refused_by_name(tmp_path: Path) -> None:
    tiny(*NATIVE["llama"]).save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(
        ModelFormatError, match=r"model-00001-of-.*no model\.safetensors\.index\.json.*rename the right"
    ):
        _load(tmp_path)


@pytest.mark.parametrize(
    "index",
    ["{}", "[]", '{"weight_map": []}', '{"weight_map": {"x": 3}}', '{"weight_map": {"x": {"y": "z"}}}']
    + [json.dumps({"weight_map": {"x": name}}) for name in ("/etc/passwd", "../model.safetensors", "a/../b", "", ".")],
)
def test_an_index_names_files_of_its_own_directory(index: str, tmp_path: Path) -> None:
    tiny(*NATIVE["llama"]).save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelFormatError, match=r"model\.safetensors\.index\.json is broken"):
        _load(tmp_path)


@pytest.mark.parametrize("stale", ["misses shards", "has other shards", "is broken"])
def test_an_index_beside_model_safetensors_is_left_over(stale: str, tmp_path: Path) -> None:
    theirs = tiny(*NATIVE["llama"])
    tiny("llama", NATIVE["llama"][1] | {"hidden_size": 32}).save_pretrained(tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    left_over = "{" if stale == "is broken" else index.read_text()
    theirs.save_pretrained(tmp_path)
    index.write_text(left_over)
    if stale == "has other shards":
        tiny("llama", NATIVE["llama"][1] | {"hidden_size": 32}).save_pretrained(tmp_path / "x", max_shard_size="20KB")
        for shard in (tmp_path / "x").glob("model-*"):
            shard.rename(tmp_path / shard.name)
    assert (_logits(_load(tmp_path)) - _expected(theirs)).abs().max() < 1e-3
    assert hub._is_complete(tmp_path)


@pytest.mark.parametrize("owner", [0, 1])
def test_a_tensor_in_two_shards_is_read_from_the_one_in_the_index(owner: int, tmp_path: Path) -> None:
    theirs = tiny(*NATIVE["llama"])
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))[:2]
    name = min(load_file(shards[owner]))
    for number, shard in enumerate(shards):
        own = {name: load_file(shards[owner])[name] + (number != owner)}
        save_file(load_file(shard) | own, shard, {"format": "pt"})
    assert (_logits(_load(tmp_path)) - _expected(theirs)).abs().max() < 1e-3


def test_a_tensor_in_two_shards_that_the_index_does_not_list_is_refused(tmp_path: Path) -> None:
    tiny(*NATIVE["llama"]).save_pretrained(tmp_path, max_shard_size="20KB")
    first, second = sorted(tmp_path.glob("*.safetensors"))[:2]
    save_file(load_file(first) | load_file(second), second, {"format": "pt"})
    index = tmp_path / "model.safetensors.index.json"
    listed, name = json.loads(index.read_text()), min(load_file(first))
    del listed["weight_map"][name]
    index.write_text(json.dumps(listed))
    with pytest.raises(ModelFormatError, match=f"{first.name}.*{name} is also in {second.name}.*index.json lists"):
        _load(tmp_path)


@pytest.mark.parametrize("copied", [0, 1])
def test_a_shard_that_is_a_copy_of_another_is_named(copied: int, tmp_path: Path) -> None:
    tiny(*NATIVE["llama"]).save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))[:2]
    shutil.copy(shards[copied], shards[1 - copied])
    with pytest.raises(ModelFormatError, match=f"{shards[1 - copied].name}: the tensor .* is missing"):
        _load(tmp_path)


def _is_read(path: Path) -> None:
    for read in (partial(load_model, dtype=torch.float32), Tokenizer.load):
        with pytest.raises(ModelFormatError, match="is a pipe, a socket or a device"):
            read(path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "file", ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "x.gguf"]
)
def test_a_pipe_among_a_models_files_is_refused_and_not_waited_for(file: str, tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    tiny(*NATIVE["llama"]).save_pretrained(tmp_path)
    (tmp_path / file).unlink(missing_ok=True)
    os.mkfifo(tmp_path / file)
    _is_read(tmp_path / file if file.endswith(".gguf") else tmp_path)


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_a_shard_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelFormatError, match=r"adapter_model\.safetensors"):
        open_safetensors(tmp_path / "adapter_model.safetensors")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    tiny(*NATIVE["llama"]).save_pretrained(tmp_path, max_shard_size="20KB")
    gone = min(tmp_path.glob("*.safetensors"))
    gone.unlink()
    with pytest.raises(ModelFormatError, match=gone.name):
        _load(tmp_path)


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_pickles_are_refused_with_a_way_to_convert_them(name: str, tmp_path: Path) -> None:
    tiny(*(NATIVE | FOREIGN)[name]).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelFormatError, match="save_pretrained"):
        _load(tmp_path)


@pytest.mark.parametrize("text", [None, "{", "{}", '{"model_type": "no such thing"}', "[]"])
def test_a_bad_configuration_is_named(text: str | None, tmp_path: Path) -> None:
    tiny(*NATIVE["llama"]).save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelFormatError, match=r"config\.json"):
        _load(tmp_path)


def test_a_directory_without_weights_says_so(tmp_path: Path) -> None:
    tiny(*NATIVE["llama"]).config.save_pretrained(tmp_path)
    with pytest.raises(ModelFormatError, match="no \\*\\.safetensors"):
        _load(tmp_path)


def test_an_unknown_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        _load(tmp_path / "nothing")


def test_tokens_that_end_a_text_come_from_generation_config_first(tmp_path: Path) -> None:
    theirs = tiny(*NATIVE["llama"])
    theirs.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert eos_token_ids(tmp_path) == (7, 2)
    (tmp_path / "generation_config.json").unlink()
    assert eos_token_ids(tmp_path) == (2,)
    assert eos_token_ids(theirs) == (2,)
    assert max_positions(tmp_path) == max_positions(theirs) == 64
    assert load_config(tmp_path).model_type == "llama"


# Loaded models


def test_a_loaded_model_shares_its_weights_and_is_not_changed() -> None:
    theirs = tiny(*NATIVE["llama"])
    before = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    ours = load_model(theirs, dtype=torch.float32)
    assert isinstance(ours, Transformer)
    assert ours._embedding.data_ptr() == theirs.model.embed_tokens.weight.data_ptr()
    assert not ours._embedding.requires_grad
    _logits(ours)
    assert all(torch.equal(tensor, before[name]) for name, tensor in theirs.state_dict().items())


# GGUF files


def _permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of queries or keys as llama.cpp does."""
    shape = (heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def _gguf_name(name: str) -> str:
    for theirs, ours in _GGUF_NAMES.items():
        name = name.replace(theirs, ours)
    return name


def _write_gguf(path: Path, model: PreTrainedModel, kind: gguf.GGMLQuantizationType, **metadata: object) -> Path:
    config, arch = model.config, model.config.model_type
    writer = begun(path, arch, config)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_token_list(["<s>", "<|im_end|>", "a", "<|endoftext|>"])
    writer.add_token_types([3, 3, 1, 3])
    writer.add_eos_token_id(1)
    for key, value in metadata.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(key.replace("__", ".").replace("ARCH", arch), value)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        array, part = tensor.numpy(), name.split(".")[-2]
        array = _permuted(array, heads[part]) if arch == "llama" and part in heads else array
        packed = kind if array.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(_gguf_name(name), gguf.quantize(np.ascontiguousarray(array), packed), raw_dtype=packed)
    finish(writer)
    return path


_WIDE = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8, "num_attention_heads": 4}
_F32, _F16, _Q8_0 = (gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "Q8_0"))


def _wide(name: str, **changes: object) -> PreTrainedModel:
    kind, fields = NATIVE[name]
    fields = fields | _WIDE | changes
    return tiny(kind, {key: value for key, value in fields.items() if kind != "qwen2" or key != "head_dim"})


@pytest.mark.parametrize("name", ["llama", "llama with tied embeddings", "qwen2", "qwen3", "qwen3 with biases"])
@pytest.mark.parametrize("kind", [_F32, _F16, _Q8_0])
def test_a_gguf_file_gives_the_logits_of_its_original(name: str, kind, tmp_path: Path) -> None:
    theirs = _wide(name)
    ours = _load(_write_gguf(tmp_path / "tiny.gguf", theirs, kind))
    with torch.no_grad():
        for weight in theirs.parameters():
            packed = gguf.quantize(weight.numpy(), kind if weight.dim() > 1 else _F32)
            weight.copy_(torch.from_numpy(gguf.dequantize(packed, kind if weight.dim() > 1 else _F32).astype("f4")))
    assert (_logits(ours) - _expected(theirs)).abs().max() < 1e-3
    assert ours.weight_bytes() == sum(parameter.nbytes for parameter in theirs.parameters())


def test_biases_of_a_llama_file_are_reordered_like_their_weights(tmp_path: Path) -> None:
    theirs = _wide("llama with biases")
    ours = _load(_write_gguf(tmp_path / "tiny.gguf", theirs, _F32))
    assert (_logits(ours) - _expected(theirs)).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("rope", "metadata"),
    [
        ({"rope_type": "linear", "factor": 3.0}, {"rope__scaling__type": "linear", "rope__scaling__factor": 3.0}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 16.0,
            },
        ),
    ],
)
def test_scaled_rotary_positions_of_a_gguf_file(rope: dict, metadata: dict, tmp_path: Path) -> None:
    theirs = _wide("llama", rope_parameters={"rope_theta": 10000.0, **rope})
    metadata = {f"ARCH__{key}": value for key, value in metadata.items()}
    ours = _load(_write_gguf(tmp_path / "tiny.gguf", theirs, _F32, **metadata))
    assert (_logits(ours, 30) - _expected(theirs, 30)).abs().max() < 1e-3


def test_llama3_frequencies_of_a_gguf_file_are_its_rope_freqs(tmp_path: Path) -> None:
    theirs = _wide("llama with llama3 rope")
    plain = 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    theirs.register_buffer("rope_freqs_weight", plain / theirs.model.rotary_emb.inv_freq)
    state = theirs.state_dict
    theirs.state_dict = lambda: {key.replace("rope_freqs_w", "rope_freqs.w"): value for key, value in state().items()}
    ours = _load(_write_gguf(tmp_path / "tiny.gguf", theirs, _F32))
    assert (_logits(ours, 30) - _expected(theirs, 30)).abs().max() < 1e-3


def test_end_tokens_of_a_gguf_file(tmp_path: Path) -> None:
    path = _write_gguf(tmp_path / "tiny.gguf", _wide("llama"), _F32)
    assert eos_token_ids(path) == (1, 3)
    assert max_positions(path) == 64
    assert load_config(path).vocab_size == VOCABULARY
    assert GGUFFile(path).metadata["tokenizer.ggml.tokens"][1] == "<|im_end|>"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"ARCH__attention__sliding_window": 4.0}, "sliding_window"),
        ({"ARCH__rope__dimension_count": 12.0}, "no part of a head of 8"),
        ({"ARCH__rope__dimension_count": 3.0}, "no part of a head of 8"),
        ({"ARCH__rope__scaling__type": "su"}, "metadata cannot be used|rotary"),
        ({"split__count": 2.0}, "llama-gguf-split"),
    ],
)
def test_unsupported_metadata_are_refused(metadata: dict, message: str, tmp_path: Path) -> None:
    path = _write_gguf(tmp_path / "tiny.gguf", _wide("llama"), _F32, **metadata)
    with pytest.raises(ModelFormatError, match=message):
        _load(path)


def test_the_number_of_key_heads_defaults_to_that_of_query_heads(tmp_path: Path, monkeypatch) -> None:
    theirs = _wide("qwen2", num_key_value_heads=4)
    monkeypatch.setattr(gguf.GGUFWriter, "add_head_count_kv", lambda *_: None)
    ours = _load(_write_gguf(tmp_path / "tiny.gguf", theirs, _F32))
    assert (_logits(ours) - _expected(theirs)).abs().max() < 1e-3


def test_an_unsupported_gguf_architecture_is_refused_before_its_tokenizer_is_built(tmp_path: Path, monkeypatch) -> None:
    model = _wide("llama")
    model.config.model_type = "mamba"
    path = _write_gguf(tmp_path / "tiny.gguf", model, _F32)
    monkeypatch.setattr(gguf_tokenizer, "_byte_level", None)
    monkeypatch.setattr(gguf_tokenizer, "_sentencepiece", None)
    monkeypatch.setattr(gguf_tokenizer, "AutoTokenizer", None)
    for load in (LLM, Tokenizer.load, _load):
        with pytest.raises(ModelFormatError, match=r"tiny\.gguf.*'mamba'.*llama, mistral3, qwen2"):
            load(path)


def test_messages_about_a_file_are_short_even_if_its_metadata_are_long(tmp_path: Path) -> None:
    path = _write_gguf(tmp_path / "tiny.gguf", _wide("llama"), _F32, ARCH__rope__scaling__type="word " * 10_000)
    with pytest.raises(ModelFormatError, match=r"tiny\.gguf") as caught:
        _load(path)
    assert len(str(caught.value)) < 1200


def test_other_gguf_architectures_are_refused(tmp_path: Path) -> None:
    model = _wide("llama")
    model.config.model_type = "rwkv7"
    with pytest.raises(ModelFormatError, match=r"rwkv7.*llama, mistral3, qwen2"):
        _load(_write_gguf(tmp_path / "tiny.gguf", model, _F32))


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return _write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", _wide("qwen2"), _Q8_0).read_bytes()


def _check_broken(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    try:
        _load(path)
    except ModelFormatError as error:
        assert path.name in str(error)  # noqa: PT017


@pytest.mark.parametrize("keep", [0, 3, 4, 10, 24, 100, 400, 2000, -40])
def test_a_truncated_gguf_file_is_named(keep: int, gguf_bytes: bytes, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(gguf_bytes[:keep])
    with pytest.raises(ModelFormatError, match=r"tiny\.gguf"):
        _load(tmp_path / "tiny.gguf")


@settings(max_examples=40, deadline=None)
@given(at=st.integers(0, 1500), byte=st.integers(0, 255))
def test_a_broken_gguf_header_never_raises_anything_else(
    at: int, byte: int, gguf_bytes: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    broken = bytearray(gguf_bytes)
    broken[at] = byte
    _check_broken(bytes(broken), tmp_path_factory.mktemp("broken") / "tiny.gguf")


@pytest.mark.parametrize("key", ["embedding_length", "block_count", "attention.head_count"])
@pytest.mark.parametrize("byte", [2, 3])
def test_a_gguf_header_with_absurd_sizes_is_refused_before_anything_is_allocated(
    key: str, byte: int, gguf_bytes: bytes, tmp_path: Path
) -> None:
    broken = bytearray(gguf_bytes)
    name = f".{key}".encode()
    broken[broken.index(name) + len(name) + 4 + byte] = 0x7F  # the value follows four bytes of its type
    (tmp_path / "tiny.gguf").write_bytes(bytes(broken))
    with pytest.raises(ModelFormatError, match="is impossible"):
        _load(tmp_path / "tiny.gguf")


def _number_of_type(content: bytes) -> int:
    """Offset of the type's number of the tensor output_norm.weight, behind its name and its one dimension."""
    name = b"output_norm.weight"
    return content.index(name) + len(name) + 4 + 8


@pytest.mark.parametrize(
    ("at", "number", "message"),
    [
        (4, 9, "GGUF version 9, which is not known; versions 2 and 3 are"),
        (4, 1, "GGUF version 1, which is not known; versions 2 and 3 are"),
        (4, 3 << 24, "is a big-endian GGUF file.*little-endian"),
        (4, 2 << 24, "is a big-endian GGUF file.*little-endian"),
        (None, 99, r"tensor output_norm\.weight of type 99, which is not known.*Q8_0"),
        (None, 24, r"tensor output_norm\.weight of type I8, which cannot be read as weights"),
    ],
)
def test_a_gguf_file_that_cannot_be_read_says_what_it_is(
    at: int | None, number: int, message: str, gguf_bytes: bytes, tmp_path: Path
) -> None:
    at = _number_of_type(gguf_bytes) if at is None else at
    (tmp_path / "tiny.gguf").write_bytes(gguf_bytes[:at] + struct.pack("<I", number) + gguf_bytes[at + 4 :])
    with pytest.raises(ModelFormatError, match=rf"tiny\.gguf.*{message}") as caught:
        _load(tmp_path / "tiny.gguf")
    assert "fetch it again" not in str(caught.value)


def test_metadata_of_an_unknown_type_say_so(gguf_bytes: bytes, tmp_path: Path) -> None:
    name = b".block_count"
    at = gguf_bytes.index(name) + len(name)
    (tmp_path / "tiny.gguf").write_bytes(gguf_bytes[:at] + struct.pack("<I", 13) + gguf_bytes[at + 4 :])
    with pytest.raises(ModelFormatError, match=r"tiny\.gguf.*block_count.*type 13, which is not known"):
        _load(tmp_path / "tiny.gguf")


_PER_LAYER: dict[str, Any] = {  # Gemma 3n and 4 have a second embedding with one part per layer
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 1,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 4,
    "head_dim": 8,
}
_GEMMAS: dict[str, dict[str, Any]] = {
    "gemma3n_text": {"num_kv_shared_layers": 0, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 3},
    "gemma4_text": {"num_kv_shared_layers": 0, "global_head_dim": 8},
}


@pytest.mark.parametrize("kind", _GEMMAS)
def test_a_per_layer_vocabulary_size_is_not_limited_like_a_number_of_layers(kind: str, tmp_path: Path) -> None:
    model = tiny(kind, NATIVE["llama"][1] | _PER_LAYER | _GEMMAS[kind])
    model.save_pretrained(tmp_path)
    assert load_model(tmp_path, dtype=torch.float32).vocab_size == VOCABULARY


def test_a_rotation_of_more_than_a_head_is_refused(tmp_path: Path) -> None:
    tiny("llama", NATIVE["llama"][1] | {"head_dim": 16}).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"]["partial_rotary_factor"] = 2.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFormatError, match="partial_rotary_factor rotates 32 elements, head_dim=16"):
        load_model(tmp_path, dtype=torch.float32)


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_attention_heads", "num_experts", "vocab_size"])
def test_a_configuration_with_an_impossible_count_is_refused_by_field(field: str, tmp_path: Path) -> None:
    tiny(*NATIVE["llama"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: 10**9}))
    with pytest.raises(ModelFormatError, match=f"{field}=1e\\+09 is impossible"):
        load_model(tmp_path, dtype=torch.float32)
