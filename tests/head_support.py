"""Tiny random draft heads in both published layouts, and a reference implementation.

``read_step_by_step`` follows the description of the format (EAGLE-3's paper and configs) with plain lists, one position
at a time. It shares no code with ``paceline.drafters.heads``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.drafters.heads.chimera import ChimeraHead
from paceline.drafters.heads.config import HeadConfig
from paceline.drafters.heads.decoder import TorchHead
from paceline.drafters.heads.feature import FeatureHead
from paceline.drafters.heads.native import NativeHead
from paceline.drafters.heads.transfer import TransferHead
from paceline.kernels.attention.reference import ReferenceAttention
from paceline.models.base import AnyModel
from paceline.models.decoding.decoder import Decoder
from paceline.models.native.model import Quantization
from toy import VOCAB

WIDTH, MLP, HEADS, KV_HEADS, VOCABULARY, DRAFTED = 24, 40, 4, 2, 61, 17

MASK = 5  # mask token of a parallel head
PARALLEL = {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"], "mask_token_id": MASK}

TRANSFERS = 3  # draft tokens of a hidden transfer or Chimera head
TRANSFER = {"speculators_model_type": "hidden_transfer", "transfers": TRANSFERS}
CHIMERA = {"speculators_model_type": "chimera", "residual_heads": TRANSFERS}

SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def layers(**fields: Any) -> dict[str, Any]:
    """Configuration of a head's layers."""
    return {
        "hidden_size": WIDTH,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": 1,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        **fields,
    }


TAPS = {"eagle_aux_hidden_state_layer_ids": [0, 1]}  # of heads for the tiny Llama
SHAPE = layers(hidden_size=32, vocab_size=VOCAB)


def speculators_config(shape: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    methods = [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}]
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": methods,
            "verifier": {"name_or_path": "someone/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {"model_type": "llama", **shape},
        "draft_vocab_size": DRAFTED,
        **fields,
    }


def flat_config(shape: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": DRAFTED,
        "tie_word_embeddings": False,
        **shape,
        **fields,
    }


def random_head(
    *,
    width: int = WIDTH,
    target_width: int = WIDTH,
    tap_count: int = 3,
    depth: int = 1,
    vocabulary: int = VOCABULARY,
    drafted: int = DRAFTED,
    switches: Sequence[str] = (),
    qk_norm: bool = False,
    seed: int = 0,
    dim: int | None = None,
    parallel: bool = False,
) -> dict[str, Tensor]:
    """Random tensors, named as in the speculators layout, all of which affect the output."""
    generator = torch.Generator().manual_seed(seed)
    dim = dim or width // HEADS

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    chosen = torch.randperm(vocabulary, generator=generator)[:drafted].sort().values
    tensors = {
        "fc.weight": noise(width, tap_count * target_width),
        "norm.weight": 1 + noise(width),
        "lm_head.weight": noise(drafted, width) * 3,
        "embed_tokens.weight": noise(vocabulary, width),
        "d2t": chosen - torch.arange(drafted),
        "t2d": torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, chosen, True),
    }
    for index in range(depth):
        layer, read = f"layers.{index}.", width * (2 if index == 0 else 1)
        norms = ["input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if index == 0 else [])]
        tensors |= {f"{layer}{name}.weight": 1 + noise(width) for name in norms}
        tensors |= {
            f"{layer}self_attn.q_proj.weight": noise(HEADS * dim, read),
            f"{layer}self_attn.k_proj.weight": noise(KV_HEADS * dim, read),
            f"{layer}self_attn.v_proj.weight": noise(KV_HEADS * dim, read),
            f"{layer}self_attn.o_proj.weight": noise(width, HEADS * dim),
            f"{layer}mlp.gate_proj.weight": noise(MLP, width),
            f"{layer}mlp.up_proj.weight": noise(MLP, width),
            f"{layer}mlp.down_proj.weight": noise(width, MLP),
        }
        if qk_norm:
            tensors |= {f"{layer}self_attn.{name}_norm.weight": 1 + noise(dim) for name in "qk"}
    if "fc_norm" in switches:
        tensors |= {f"fc_norm.{tap}.weight": 1 + noise(target_width) for tap in range(tap_count)}
    if "norm_before_fc" in switches:
        tensors["input_norm.weight"] = 1 + noise(tap_count * target_width)
    if parallel:
        tensors["mask_hidden"] = noise(1, 1, tap_count * target_width) * 3
    return tensors


def random_transfer(*, width: int = WIDTH, biased: bool = False, **options: Any) -> dict[str, Tensor]:
    """Random tensors of a hidden transfer head, whose layers are plain transformer layers."""
    tensors = random_head(width=width, target_width=width, tap_count=1, **options)
    generator = torch.Generator().manual_seed(options.get("seed", 0))
    del tensors["fc.weight"], tensors["layers.0.hidden_norm.weight"]
    for part in "qkv":
        for index in range(options.get("depth", 1)):
            name = f"layers.{index}.self_attn.{part}_proj"
            tensors[f"{name}.weight"] = weight = tensors[f"{name}.weight"][:, :width]
            if biased:
                tensors[f"{name}.bias"] = torch.randn(len(weight), generator=generator)
    return tensors | {"transfer": torch.randn(TRANSFERS, width, 2 * width, generator=generator) * 0.2}


def random_chimera(*, width: int = WIDTH, **options: Any) -> dict[str, Tensor]:
    """Random tensors of a Chimera head, whose layers are plain transformer layers."""
    tensors = random_transfer(width=width, **options)
    del tensors["transfer"]
    generator = torch.Generator().manual_seed(options.get("seed", 0) + 1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    return tensors | {
        "embed_norm.weight": 1 + noise(width),
        "hidden_norm.weight": 1 + noise(width),
        "trigram_in.weight": noise(width, 3 * width),
        "trigram_out.weight": noise(width, width),
        "fc.weight": noise(width, width),
        "heads": noise(TRANSFERS, width, width),
    }


def write(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def published(
    directory: Path, *, flat: bool = False, own_embedding: bool = True, parallel: bool = False, **fields: Any
) -> Path:
    """A head for the tiny Llama in either layout."""
    tensors = random_head(width=32, target_width=32, tap_count=2, vocabulary=VOCAB, drafted=16, parallel=parallel)
    if not own_embedding:
        del tensors["embed_tokens.weight"]
    fields = {"draft_vocab_size": 16} | TAPS | (PARALLEL if parallel else {}) | fields
    if flat:
        return write(directory, flat_config(SHAPE, **fields), flat_names(tensors))
    return write(directory, speculators_config(SHAPE, **fields), tensors)


def published_transfer(directory: Path) -> Path:
    """A hidden transfer head for the tiny Llama."""
    fields = TRANSFER | {"draft_vocab_size": 16, "eagle_aux_hidden_state_layer_ids": [1]}
    tensors = random_transfer(width=32, vocabulary=VOCAB, drafted=16, depth=2)
    return write(directory, speculators_config(SHAPE | {"num_hidden_layers": 2}, **fields), tensors)


def published_chimera(directory: Path) -> Path:
    """A Chimera head for the tiny Llama."""
    fields = CHIMERA | {"draft_vocab_size": 16, "eagle_aux_hidden_state_layer_ids": [0, 2]}
    return write(directory, speculators_config(SHAPE, **fields), random_chimera(width=32, vocabulary=VOCAB, drafted=16))


def flat_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}


# The reference implementation


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean() + eps).sqrt() * weight


def _turned(x: Tensor, position: int, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    angles = torch.tensor([position * theta ** (-pair / half) for pair in range(half)])
    a, b = x.split(half, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class Reading:
    """Reference head for one text, one position at a time, with keys and values in lists."""

    def __init__(
        self, tensors: Mapping[str, Tensor], switches: Sequence[str] = (), theta: float = 10000.0, window: int = 0
    ) -> None:
        self.t, self.switches, self.theta, self.eps, self.window = tensors, switches, theta, 1e-5, window
        self.depth = sum(name.endswith("input_layernorm.weight") for name in tensors)
        self.kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(self.depth)]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return _normed(x, self.t[f"{name}.weight"], self.eps)

    def fused(self, states: Tensor) -> Tensor:
        """Fuse the target's hidden states [S, target width] to the head's input [H]."""
        if "fc_norm" in self.switches:
            states = torch.stack([self.norm(state, f"fc_norm.{i}") for i, state in enumerate(states)])
        flat = states.flatten()
        if "norm_before_fc" in self.switches:
            flat = self.norm(flat, "input_norm")
        return self.t["fc.weight"] @ flat

    def after(self, draft_token: int, state: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Step after the text: from a draft token and its state or, in a parallel head, from the mask."""
        if "mask_hidden" not in self.t:
            return self.step(draft_token, state, position)
        apart = max(1, sum(name.startswith("fc_norm") for name in self.t))  # hidden states with separate norms
        return self.step(MASK, self.fused(self.t["mask_hidden"].view(apart, -1)), position)

    def step(self, token: int, hidden: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Read one token; return the state for the next step and the logits over the head's vocabulary."""
        normed = self.norm(hidden, "layers.0.hidden_norm")
        residual = normed if "norm_before_residual" in self.switches else hidden
        read = torch.cat((self.norm(self.t["embed_tokens.weight"][token], "layers.0.input_layernorm"), normed))
        return self.through(residual, read, position)

    def through(self, residual: Tensor, read: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Run all layers; the first one adds its output for ``read`` to ``residual``."""
        hidden = residual
        for index in range(self.depth):
            if index:
                residual, read = hidden, self.norm(hidden, f"layers.{index}.input_layernorm")
            hidden = residual + self.attended(index, read, position)
            layer = f"layers.{index}."
            inner = self.norm(hidden, f"{layer}post_attention_layernorm")
            gate = torch.nn.functional.silu(self.t[f"{layer}mlp.gate_proj.weight"] @ inner)
            up = self.t[f"{layer}mlp.up_proj.weight"] @ inner
            hidden = hidden + self.t[f"{layer}mlp.down_proj.weight"] @ (gate * up)
        out = self.norm(hidden, "norm")
        return out if "norm_output" in self.switches else hidden, self.t["lm_head.weight"] @ out

    def attended(self, index: int, read: Tensor, position: int) -> Tensor:
        name = f"layers.{index}.self_attn"
        q, k, v = (self.t[f"{name}.{part}_proj.weight"] @ read for part in "qkv")
        if f"{name}.q_proj.bias" in self.t:
            q, k, v = (x + self.t[f"{name}.{part}_proj.bias"] for x, part in zip((q, k, v), "qkv", strict=True))
        dim = q.shape[0] // HEADS
        q, k, v = q.view(HEADS, dim), k.view(KV_HEADS, dim), v.view(KV_HEADS, dim)
        if f"{name}.q_norm.weight" in self.t:
            q = torch.stack([self.norm(head, f"{name}.q_norm") for head in q])
            k = torch.stack([self.norm(head, f"{name}.k_norm") for head in k])
        self.kept[index].append((_turned(k, position, self.theta), v))
        q = _turned(q, position, self.theta)
        out, seen = [], self.kept[index][-self.window :]
        all_keys, all_values = (torch.stack(list(each)) for each in zip(*seen, strict=True))
        for head in range(HEADS):
            group = head * KV_HEADS // HEADS
            scores = all_keys[:, group] @ q[head] / dim**0.5
            out.append(scores.softmax(0) @ all_values[:, group])
        return self.t[f"{name}.o_proj.weight"] @ torch.cat(out)

    def forget(self, places: int) -> None:
        for kept in self.kept:
            del kept[places:]

    def text(self, tokens: Sequence[int], states: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Read a text: tokens[i] is token i + 1, states[i] are the hidden states of token i.

        Returns the state and the logits of the first draft token.
        """
        for place, token in enumerate(tokens):
            read = self.step(token, self.fused(states[place]), place)
        return read


class TransferReading(Reading):
    """Reference implementation of a hidden transfer head."""

    def text(self, tokens: Sequence[int], states: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        for place, state in enumerate(states[: len(tokens)]):
            self.step(tokens[place], state[-1], place)
        self.last, self.end = (tokens[-1], states[len(tokens) - 1][-1]), len(tokens)
        return self.after(tokens[-1], states[-1], len(tokens) - 1)

    def step(self, token: int, hidden: Tensor, position: int) -> tuple[Tensor, Tensor]:
        return self.through(hidden, self.norm(hidden, "layers.0.input_layernorm"), position)

    def after(self, draft_token: int, state: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Step at the next position; the draft token does not matter."""
        token, hidden = self.last
        embedded, size = self.t["embed_tokens.weight"][token], hidden.norm() / len(hidden) ** 0.5
        read = torch.cat((hidden / size, embedded * len(hidden) ** 0.5 / embedded.norm()))
        step = min(position + 1 - self.end, TRANSFERS - 1)
        return self.step(token, hidden + size * (self.t["transfer"][step] @ read), position + 1)


class ChimeraReading(Reading):
    """Reference implementation of a Chimera head. The hidden states of a token are its embedding and the last one."""

    def text(self, tokens: Sequence[int], states: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        before, self.end = states[0][0], len(tokens)
        for place, (token, (current, last)) in enumerate(zip(tokens, states[: len(tokens)], strict=True)):
            three = (before, current, self.t["embed_tokens.weight"][token])
            trigram = [self.norm(embedded, "embed_norm") for embedded in three]
            inner = torch.nn.functional.silu(self.t["trigram_in.weight"] @ torch.cat(trigram))
            x = trigram[-1] + self.t["trigram_out.weight"] @ inner
            context, _ = self.through(x, self.norm(x, "layers.0.input_layernorm"), place)
            self.sum = context + self.t["fc.weight"] @ self.norm(last, "hidden_norm")
            before = current
        return self.after(0, self.sum, len(tokens) - 1)

    def after(self, draft_token: int, state: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """The next head; neither draft token nor position matters to it."""
        block = self.t["heads"][min(position + 1 - self.end, TRANSFERS - 1)]
        normed = self.norm(self.sum + torch.nn.functional.silu(block @ self.sum), "norm")
        return state, self.t["lm_head.weight"] @ normed


def reading_of(tensors: Mapping[str, Tensor], **options: Any) -> Reading:
    kinds = {"transfer": TransferReading, "heads": ChimeraReading}
    return next((kinds[name] for name in kinds if name in tensors), Reading)(tensors, **options)


def read_step_by_step(reading: Reading, tokens: Sequence[int], states: Tensor, steps: int) -> list[list[Tensor]]:
    """Logits of draft step s at every position i, as result[s][i], with the true tokens as input.

    tokens[i] is token i + 1 of the text.
    """
    found: list[list[Tensor]] = [[] for _ in range(steps)]
    for place in range(len(tokens)):
        hidden = reading.fused(states[place])
        for step in range(min(steps, len(tokens) - place)):
            read = reading.step if step == 0 else reading.after
            hidden, logits = read(tokens[place + step], hidden, place + step)
            found[step].append(logits)
        reading.forget(place + 1)
    return found


# Heads for tiny targets


def tiny_head(
    target: AnyModel,
    target_width: int,
    taps: Sequence[int] = (0, 1),
    seed: int = 0,
    *,
    parallel: bool = False,
    drafted: int | None = None,
) -> TorchHead:
    """Random head. drafted: size of its vocabulary; None: two thirds of the target's tokens."""
    head = tiny_feature_head(target.vocab_size, target_width, taps, seed, parallel=parallel, drafted=drafted)
    return TorchHead(head, "tiny head", taps, target.max_positions)


def tiny_transfer_head(target: AnyModel, target_width: int, seed: int = 0) -> TorchHead:
    """Random hidden transfer head that reads the input of layer 1, with the same vocabulary as ``tiny_head``."""
    vocabulary, drafted = target.vocab_size, 2 * target.vocab_size // 3
    shape = layers(hidden_size=target_width, vocab_size=vocabulary, head_dim=4, num_hidden_layers=2)
    config = HeadConfig({"model_type": "llama", **shape}, target_width, drafted, (1,), transfers=TRANSFERS)
    head = TransferHead(config)
    options = {"width": target_width, "vocabulary": vocabulary, "drafted": drafted, "depth": 2, "seed": seed, "dim": 4}
    head.load_state_dict(random_transfer(**options))
    return TorchHead(head.requires_grad_(False), "tiny head", (1,), target.max_positions)


def tiny_chimera_head(target: AnyModel, target_width: int, seed: int = 0) -> TorchHead:
    """Random Chimera head with the same vocabulary as ``tiny_head``."""
    vocabulary, drafted, taps = target.vocab_size, 2 * target.vocab_size // 3, (0, target.layers)
    shape = layers(hidden_size=target_width, vocab_size=vocabulary, head_dim=4)
    head = ChimeraHead(
        HeadConfig({"model_type": "llama", **shape}, target_width, drafted, taps, residual_heads=TRANSFERS)
    )
    head.load_state_dict(random_chimera(width=target_width, vocabulary=vocabulary, drafted=drafted, seed=seed, dim=4))
    return TorchHead(head.requires_grad_(False), "tiny head", taps, target.max_positions)


def tiny_native_head(
    target: AnyModel,
    target_width: int,
    taps: Sequence[int] = (0, 1),
    quantization: Quantization | None = "int8",
    *,
    parallel: bool = False,
    drafted: int | None = None,
) -> NativeHead:
    """Random head on the CPU kernels, which require a head dimension of at least 16. drafted: as for ``tiny_head``."""
    head = tiny_feature_head(target.vocab_size, target_width, taps, dim=16, parallel=parallel, drafted=drafted)
    return NativeHead(head, "tiny head", taps, target.max_positions, quantization=quantization)


def tiny_feature_head(
    vocabulary: int,
    target_width: int,
    taps: Sequence[int],
    seed: int = 0,
    dim: int = 4,
    *,
    switches: Sequence[str] = (),
    qk_norm: bool = False,
    depth: int = 1,
    parallel: bool = False,
    drafted: int | None = None,
) -> FeatureHead:
    drafted = 2 * vocabulary // 3 if drafted is None else drafted
    tensors = random_head(
        width=16,
        target_width=target_width,
        tap_count=len(taps),
        depth=depth,
        vocabulary=vocabulary,
        drafted=drafted,
        switches=switches,
        qk_norm=qk_norm,
        seed=seed,
        dim=dim,
        parallel=parallel,
    )
    family = "qwen3" if qk_norm else "llama"
    shape = layers(hidden_size=16, vocab_size=vocabulary, head_dim=dim, num_hidden_layers=depth)
    options: dict[str, Any] = dict.fromkeys(switches, True) | {
        "mask_token": min(MASK, vocabulary - 1) if parallel else None
    }
    head = FeatureHead(HeadConfig({"model_type": family, **shape}, target_width, drafted, tuple(taps), **options))
    head.load_state_dict(tensors)
    return head.requires_grad_(False)


# Hidden states of a target


class Recorder:
    """A reader that stores the hidden states of one row."""

    def __init__(self, taps: Sequence[int]) -> None:
        self.taps, self.shown = taps, {}

    def read(self, rows: Tensor, slots: Tensor, features: Tensor) -> None:
        self.shown |= dict(zip(slots.tolist(), features, strict=True))

    def keep_paths(self, rows: Tensor, text: Tensor, paths: Tensor) -> None:
        raise AssertionError("there are no trees here")

    copy_row = keep_paths


def features_of(target: AnyModel, text: list[int], taps: Sequence[int]) -> list[Tensor]:
    """Hidden states [taps, width] of each token, from one plain pass."""
    decoder, recorder = Decoder(target, ReferenceAttention(), 1, len(text)), Recorder(taps)
    decoder.attach_reader(recorder)
    decoder.forward(torch.tensor([text]), torch.zeros(1, dtype=torch.int64), len(text))
    return [recorder.shown[place] for place in range(len(text))]
