"""Tiny random block drafters in every published layout, and a slow reference with plain lists.

``BlockReading`` follows the published description of the kinds, one row at a time. It shares no code with
``paceline.drafters.heads``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from gguf_support import finish
from head_support import _normed, _turned, layers, write
from paceline.drafters.heads import block_gguf
from paceline.drafters.heads.block import BlockHead
from paceline.drafters.heads.block_decoder import TorchBlock
from paceline.drafters.heads.block_layouts import block_layout_of, read_block
from paceline.drafters.heads.block_native import NativeBlock
from paceline.drafters.heads.block_spec import BlockSpec
from paceline.drafters.heads.config import HeadConfig
from paceline.models.base import AnyModel
from paceline.models.native.model import Quantization
from toy import VOCAB

WIDTH, MLP, HEADS, KV_HEADS, VOCABULARY = 24, 40, 4, 2, 61
SIZE, RANK, MASK = 5, 6, 7

PARTS: dict[str, dict[str, Any]] = {  # fields of ``BlockSpec`` of each kind
    "dflash": {},
    "anchor first": {"anchor_first": True},
    "dspark": {
        "anchor_first": True,
        "markov_rank": RANK,
        "confidence": True,
        "confidence_reads_token": True,
    },
    "dspark gated": {"anchor_first": True, "markov_rank": RANK, "markov": "gated", "confidence": True},
    "dspark rnn": {"anchor_first": True, "markov_rank": RANK, "markov": "rnn"},
    "dflash2": {
        "selector_rank": RANK,
        "selector_top_k": 3,
        "conv_kernel": 2,
        "conv_group": 4,
        "causal": False,
        "output_multiplier": 0.5,
        "logits_cap": 6.0,
        "embedding_scale": 1.5,
    },
}


def random_block(config: HeadConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors of a block drafter, all of which affect the output, named as in the dflash layout."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in BlockHead(config).state_dict().items()}
    tensors = {}
    for name, shape in shapes.items():
        if name in ("d2t", "t2d"):
            continue
        noise = torch.randn(shape, generator=generator) * 0.3
        tensors[name] = 1 + noise if name.endswith("norm.weight") else noise
        if name.endswith(("lm_head.weight", "codebook", "markov_w2.weight", "markov_w1.weight")):
            tensors[name] *= 3
        if name.endswith("kernel_projection.weight"):  # larger weights of taps would enlarge every rounding
            tensors[name] *= 0.1
        if name.endswith("base_kernel"):
            tensors[name][:, 0] += 1
    chosen = torch.randperm(config.decoder.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
    tensors["d2t"] = chosen - torch.arange(len(chosen))
    tensors["t2d"] = torch.zeros(config.decoder.vocab_size, dtype=torch.bool).index_fill_(0, chosen, True)
    return tensors


def block_config(
    kind: str, vocabulary: int, target_width: int, taps: Sequence[int], drafted: int | None = None, **shape: Any
) -> HeadConfig:
    """Configuration of a tiny block drafter of a kind of ``PARTS``: a windowed layer and a full one."""
    fields = {"hidden_size": target_width, "vocab_size": vocabulary, "num_hidden_layers": 2, "head_dim": 8}
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "use_sliding_window": True}
    transformer = {"model_type": "qwen3", **layers(**fields), **windows, **shape}
    parts = {"size": SIZE, "mask_token": min(MASK, vocabulary - 1)} | PARTS[kind]
    if kind == "dflash2":
        parts["selector_top_k"] = min(3, vocabulary)
    return HeadConfig(transformer, target_width, drafted or vocabulary, tuple(taps), block=BlockSpec(**parts))


def tiny_block(
    target: AnyModel, target_width: int, kind: str = "dflash", taps: Sequence[int] = (0, 1), *, reduced: bool = False
) -> TorchBlock:
    """Random block drafter. reduced: whether it drafts two thirds of the target's tokens only."""
    vocabulary = target.vocab_size
    config = block_config(kind, vocabulary, target_width, taps, 2 * vocabulary // 3 if reduced else None)
    head = BlockHead(config)
    head.load_state_dict(random_block(config))
    head = head.requires_grad_(False).to(target.device)
    return TorchBlock(head, "tiny block drafter", taps, target.max_positions)


def tiny_native_block(
    target: AnyModel,
    target_width: int,
    kind: str = "dflash",
    taps: Sequence[int] = (0, 1),
    quantization: Quantization | None = "int8",
    *,
    reduced: bool = False,
) -> NativeBlock:
    """The same on the CPU kernels, which require heads of at least 16 elements."""
    vocabulary = target.vocab_size
    drafted = 2 * vocabulary // 3 if reduced else None
    config = block_config(kind, vocabulary, target_width, taps, drafted, head_dim=16)
    head = BlockHead(config)
    head.load_state_dict(random_block(config))
    made = head.requires_grad_(False).bfloat16()
    return NativeBlock(made, "tiny block drafter", taps, target.max_positions, quantization=quantization)


LAYERS = {
    "hidden_size": 32,
    "intermediate_size": MLP,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "layer_types": ["full_attention", "full_attention"],
    "sliding_window": None,
    "use_sliding_window": False,
    "dtype": "bfloat16",
}
OLD_LAYERS = LAYERS | {"rope_theta": 1000000, "rope_scaling": None, "use_cache": True, "max_window_layers": 36}
NEW_LAYERS = LAYERS | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000},
    "layer_types": ["sliding_attention", "sliding_attention"],
    "sliding_window": 4,
    "is_causal": False,
}
SPECULATORS = {
    "transformer_layer_config": OLD_LAYERS | {"model_type": "qwen3"},
    "speculators_version": "0.5.0",
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
        "verifier": {"name_or_path": "someone/target", "architectures": ["LlamaForCausalLM"]},
    },
    "aux_hidden_state_layer_ids": [0, 1],
    "mask_token_id": MASK,
    "block_size": SIZE,
    "draft_vocab_size": 16,
    "target_hidden_size": 32,
}
_MARKOV = {"markov_rank": RANK, "markov_head_type": "vanilla"}
_CONFIDENCE = {"enable_confidence_head": True, "confidence_head_with_markov": True}
_DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": RANK, "selector_top_k": 4}

LAYOUTS: dict[str, dict[str, Any]] = {  # config.json of drafters for the tiny Llama, as published
    "dflash": {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        **OLD_LAYERS,
        "block_size": SIZE,
        "num_target_layers": 2,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [-1, 0]},
    },
    "dflash, newer": {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **NEW_LAYERS,
        "dflash_config": {"block_size": SIZE, "mask_token_id": MASK, "target_layer_ids": [-1, 0], "causal": False},
    },
    "deepspec": {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        **OLD_LAYERS,
        "block_size": SIZE,
        "mask_token_id": MASK,
        "target_layer_ids": [-1, 0],
        "num_target_layers": 2,
        "num_anchors": 512,
        **_MARKOV,
        **_CONFIDENCE,
    },
    "deepspec without a Markov head": {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        **OLD_LAYERS,
        "block_size": SIZE,
        "mask_token_id": MASK,
        "target_layer_ids": [-1, 0],
        "markov_rank": 0,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    },
    "specforge": {
        "architectures": ["DSparkDraftModel"],
        "model_type": "qwen3",
        **OLD_LAYERS,
        "block_size": SIZE,
        "dflash_config": {
            "mask_token_id": MASK,
            "target_layer_ids": [-1, 0],
            "projector_type": "dspark",
            **_MARKOV,
            **_CONFIDENCE,
        },
    },
    "dflash2": {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        **NEW_LAYERS,
        "num_target_layers": 2,
        "dflash_config": {
            "block_size": SIZE,
            "mask_token_id": MASK,
            "target_layer_ids": [-1, 0],
            **_DFLASH2,
            "output_multiplier": 0.196116,
            "final_logit_softcapping": 20,
            "input_embedding_scale": 1.0,
        },
    },
    "muse_glimmer": {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        **{name: value for name, value in NEW_LAYERS.items() if name not in ("vocab_size", "is_causal")},
        "block_size": SIZE,
        "mask_token_id": MASK,
        "target_layer_ids": [-1, 0],
    },
    "speculators dflash": {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        **SPECULATORS,
    },
    "speculators dspark": {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        **SPECULATORS,
        **_MARKOV,
        **_CONFIDENCE,
    },
    "speculators dflash2": {
        "architectures": ["DFlash2Speculator"],
        "speculators_model_type": "dflash2",
        **SPECULATORS,
        "draft_vocab_size": VOCAB,
        "sliding_window_non_causal": True,
        "sample_from_anchor": False,
        **_DFLASH2,
    },
}
SHARED = ("embed_tokens.weight", "lm_head.weight")  # which these layouts take from the target


def published_block(directory: Path, layout: str, **changed: Any) -> Path:
    """A block drafter for the tiny Llama in a layout of ``LAYOUTS``, tensor for tensor. changed: its fields."""
    fields = {name: value for name, value in (LAYOUTS[layout] | changed).items() if value is not None}
    named = block_layout_of(fields)
    assert named is not None
    tensors = random_block(read_block(fields, named, VOCAB))
    owns_ends = named in ("speculators", "deepspec")
    whole = len(tensors["d2t"]) == VOCAB
    dropped = (*(() if owns_ends else SHARED), *(("d2t", "t2d") if whole else ()))
    tensors = {name: tensor for name, tensor in tensors.items() if name not in dropped}
    if named == "muse_glimmer":
        muse = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
        tensors = {muse.get(name, name): tensor for name, tensor in tensors.items()}
    return write(directory, fields, tensors)


class BlockReading:
    """Reference block drafter for one text, one row at a time. states[j]: the target's hidden states of token j."""

    def __init__(self, config: HeadConfig, tensors: Mapping[str, Tensor]) -> None:
        assert config.block is not None
        self.spec, self.shape, self.t = config.block, config.transformer, tensors
        self.eps, self.depth = self.shape["rms_norm_eps"], self.shape["num_hidden_layers"]
        self.theta = self.shape.get("rope_theta", (self.shape.get("rope_parameters") or {}).get("rope_theta", 10000.0))

    def norm(self, x: Tensor, name: str) -> Tensor:
        return _normed(x, self.t[f"{name}.weight"], self.eps)

    def heads(self, index: int, part: str, x: Tensor) -> Tensor:
        made = (self.t[f"layers.{index}.self_attn.{part}_proj.weight"] @ x).view(-1, self.shape["head_dim"])
        if part == "v":
            return made
        return torch.stack([self.norm(head, f"layers.{index}.self_attn.{part}_norm") for head in made])

    def context(self, states: Sequence[Tensor]) -> list[list[tuple[int, Tensor, Tensor]]]:
        """Position, key and value of every token of a text but the last, for each layer."""
        fused = [self.norm(self.t["fc.weight"] @ state.flatten(), "hidden_norm") for state in states]
        return [
            [(j, _turned(self.heads(i, "k", c), j, self.theta), self.heads(i, "v", c)) for j, c in enumerate(fused)]
            for i in range(self.depth)
        ]

    def rows(self, anchor: int, states: Sequence[Tensor]) -> list[Tensor]:
        """States after the last norm of a block's rows that draft, after a text of len(states) + 1 tokens."""
        start, context = len(states), self.context(states)
        tokens = [anchor, *[self.spec.mask_token] * (self.spec.size - 1)]
        block = [self.t["embed_tokens.weight"][token] * self.spec.embedding_scale for token in tokens]
        for i in range(self.depth):
            name = f"layers.{i}."
            inputs = [self.norm(x, f"{name}input_layernorm") for x in block]
            mixed = self.convolved(i, "attention_conv", inputs, lambda y, i=i: self.attended(i, y, start, context[i]))
            block = [x + y for x, y in zip(block, mixed, strict=True)]
            inputs = [self.norm(x, f"{name}post_attention_layernorm") for x in block]
            block = [x + y for x, y in zip(block, self.convolved(i, "mlp_conv", inputs, self.mlp(i)), strict=True)]
        return [self.norm(x, "norm") for x in block[self.spec.first_row :]]

    def mlp(self, index: int) -> Any:
        gate, up, down = (self.t[f"layers.{index}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return lambda xs: [down @ (torch.nn.functional.silu(gate @ x) * (up @ x)) for x in xs]

    def attended(self, i: int, xs: list[Tensor], start: int, context: list[tuple[int, Tensor, Tensor]]) -> list[Tensor]:
        windowed = self.shape.get("layer_types", ["full_attention"] * self.depth)[i] == "sliding_attention"
        window = self.shape["sliding_window"] if windowed else None
        causal = windowed if self.spec.causal is None else self.spec.causal
        own = [
            (start + t, _turned(self.heads(i, "k", x), start + t, self.theta), self.heads(i, "v", x))
            for t, x in enumerate(xs)
        ]
        results = []
        for t, x in enumerate(xs):
            at, q = start + t, _turned(self.heads(i, "q", x), start + t, self.theta)
            near = [entry for entry in (*context, *own) if window is None or entry[0] > at - window]
            seen = [entry for entry in near if not causal or entry[0] <= at]
            out = []
            for head in range(q.shape[0]):
                group = head * self.shape["num_key_value_heads"] // q.shape[0]
                scores = torch.stack([q[head] @ key[group] for _, key, _ in seen]) / q.shape[1] ** 0.5
                out.append(scores.softmax(0) @ torch.stack([value[group] for *_, value in seen]))
            results.append(self.t[f"layers.{i}.self_attn.o_proj.weight"] @ torch.cat(out))
        return results

    def convolved(self, i: int, conv: str, xs: list[Tensor], sublayer: Any) -> list[Tensor]:
        name, taps = f"layers.{i}.{conv}.", self.spec.conv_kernel
        if not taps:
            return list(sublayer(xs))
        base, group = self.t[f"{name}base_kernel"], self.spec.conv_group
        kernels = [(self.t[f"{name}kernel_projection.weight"] @ x).view(2, taps, -1) for x in xs]

        def side(number: int, us: list[Tensor]) -> list[Tensor]:
            made = []
            for t in range(len(us)):
                y = torch.zeros_like(us[t])
                for tap in range(min(taps, t + 1)):
                    weight = base[number, tap] + kernels[t][number, tap].repeat_interleave(group)
                    y += weight * us[t - tap]
                made.append(y)
            return made

        return side(1, list(sublayer(side(0, xs))))

    def logits(self, rows: Sequence[Tensor], path: Sequence[int]) -> Tensor:
        """Logits over the drafter's vocabulary of the draft token behind path[1:]; path[0] is the anchor."""
        z, last = rows[len(path) - 1], path[-1]
        logits = self.t["lm_head.weight"] @ z * self.spec.output_multiplier
        if self.spec.logits_cap is not None:
            logits = self.spec.logits_cap * (logits / self.spec.logits_cap).tanh()
        if self.spec.markov_rank:
            logits = logits + self.t["markov_head.markov_w2.weight"] @ self.markov(rows, path)
        if self.spec.selector_rank:
            query = self.t["candidate_selector.predecessor_codebook"][last]
            query = query * (self.t["candidate_selector.hidden_projection.weight"] @ z)
            kept = sorted(range(len(logits)), key=lambda token: -float(logits[token]))[: self.spec.selector_top_k]
            scored = torch.full_like(logits, -1e30)
            for token in kept:
                scored[token] = logits[token] + query @ self.t["candidate_selector.successor_codebook"][token]
            logits = scored
        return logits

    def markov(self, rows: Sequence[Tensor], path: Sequence[int]) -> Tensor:
        w1 = self.t["markov_head.markov_w1.weight"]
        if self.spec.markov == "vanilla":
            return w1[path[-1]]
        if self.spec.markov == "gated":
            weight, bias = self.t["markov_head.gate_proj.weight"], self.t["markov_head.gate_proj.bias"]
            before = w1[path[-1]]
            return torch.sigmoid(weight @ torch.cat((rows[len(path) - 1], before)) + bias) * before
        state = torch.zeros(self.spec.markov_rank)
        for z, token in zip(rows, path, strict=False):
            weight, bias = self.t["markov_head.joint_proj.weight"], self.t["markov_head.joint_proj.bias"]
            gate, candidate, output = (weight @ torch.cat((state, w1[token], z)) + bias).chunk(3)
            state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
        return torch.tanh(output)

    def confidence(self, rows: Sequence[Tensor], path: Sequence[int]) -> float:
        z = rows[len(path) - 1]
        if self.spec.confidence_reads_token:
            z = torch.cat((z, self.t["markov_head.markov_w1.weight"][path[-1]]))
        return float(torch.sigmoid(self.t["confidence_head.proj.weight"] @ z + self.t["confidence_head.proj.bias"]))

    def draft(self, text: Sequence[int], states: Sequence[Tensor], k: int) -> list[int]:
        """The k most probable draft tokens, one after the other. states: of all tokens of the text but the last."""
        rows, path = self.rows(text[-1], states), [text[-1]]
        for _ in range(k):
            best = int(self.logits(rows, path).argmax())
            path.append(best + int(self.t["d2t"][best]))
        return path[1:]


def published_gguf(path: Path, kind: str, **changed: Any) -> Path:
    """A block drafter for the tiny Llama in a GGUF file, as llama.cpp names its tensors."""
    config = block_config(kind, VOCAB, 32, (0, 1), None if kind == "dflash2" else 16)
    tensors = random_block(config)
    spec, shape = config.block, config.transformer
    assert spec is not None
    writer = gguf.GGUFWriter(path, "dflash")
    numbers = {
        "context_length": 64,
        "block_count": 2,
        "embedding_length": 32,
        "feed_forward_length": MLP,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": 8,
        "attention.value_length": 8,
        "attention.sliding_window": shape["sliding_window"],
        "block_size": SIZE,
        "conv_kernel_size": spec.conv_kernel,
        "conv_group_size": spec.conv_group,
        "selector_rank": spec.selector_rank,
        "selector_top_k": spec.selector_top_k,
        **changed,
    }
    for name, number in numbers.items():
        writer.add_uint32(f"dflash.{name}", number)
    writer.add_float32("dflash.attention.layer_norm_rms_epsilon", shape["rms_norm_eps"])
    writer.add_float32("dflash.rope.freq_base", 10000.0)
    writer.add_float32("dflash.final_logit_softcapping", spec.logits_cap or 0.0)
    writer.add_array("dflash.target_layers", [0, 1])
    writer.add_array("dflash.attention.sliding_window_pattern", [True, False])
    if spec.causal is not None:
        writer.add_bool("dflash.attention.causal", spec.causal)
    if kind == "anchor first":
        writer.add_string("dflash.sample_from_anchor", "true")
    writer.add_uint32("tokenizer.ggml.mask_token_id", spec.mask_token)
    theirs = {ours: name for name, ours in block_gguf._TENSORS.items() if not name.startswith("selector.")}
    layers = {ours: name for name, ours in block_gguf._OF_LAYERS.items()}
    for name, tensor in tensors.items():
        if name in SHARED[:1] or name == "t2d" or (name == "lm_head.weight" and kind == "dflash2"):
            continue
        if name == "d2t":
            if len(tensor) < VOCAB:
                writer.add_tensor("d2t", (tensor + torch.arange(len(tensor))).numpy())
            continue
        _, index, rest = name.split(".", 2) if name.startswith("layers.") else ("", "", "")
        writer.add_tensor(f"blk.{index}.{layers[rest]}" if index else theirs.get(name, name), tensor.numpy())
    finish(writer)
    return path
