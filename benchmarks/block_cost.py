"""What a draft of a block drafter costs beside a plain round, by draft length and number of rows, on the CPU kernels.

    python -m benchmarks.block_cost --rows 1 4 8 --drafted 1 2 3 4 5 6 7 8 --output block-cost.json

Random weights of true shapes, by default Qwen3-8B's and those of its published DFlash drafter with five layers: time
does not depend on their values, acceptance would. All layers of the target hold equal numbers in memory of their own.
plain_ms: of a round without drafts. draft_ms: of a draft after a round that accepted ``--accepted`` tokens, whose keys
and values are made first. Sizes take turns, and the median counts. share: draft_ms / plain_ms. With fewer
``--target-layers`` than the model has, plain_ms is shorter and share larger; a target needs six for the hidden states.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.cli.document import end
from paceline.config import EngineConfig, SamplingParams
from paceline.core.batch import Batch, RowStart, SpeculationPlan
from paceline.core.draft import empty_draft
from paceline.drafters.heads.block import BlockHead
from paceline.drafters.heads.block_native import NativeBlock
from paceline.drafters.heads.block_spec import BlockSpec
from paceline.drafters.heads.config import HeadConfig
from paceline.engine.assembly import Models
from paceline.engine.engine import Engine
from paceline.engine.rounds.kernels import NativeRound
from paceline.kernels.cpu import cpu_ops
from paceline.kernels.spec import LayerWeights, LinearWeights, NativeSpec
from paceline.models.description.spec import DecoderSpec
from paceline.models.families import describe
from paceline.models.native.model import NativeModel, Quantization
from paceline.tools.bench.offline import machine

QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "tie_word_embeddings": True,  # one matrix less to make; a round reads the output head alone
}
CONTEXT = 96  # tokens per row
DRAFTERS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dspark": {"anchor_first": True, "markov_rank": 256, "confidence": True, "confidence_reads_token": True},
}


def noise(*shape: int) -> Tensor:
    """Random weights in bfloat16."""
    return torch.randn(shape, dtype=torch.bfloat16) * 0.02


def random_target(shape: dict[str, Any], quantization: Quantization | None) -> NativeModel:
    """A target of these shapes on the CPU kernels."""
    spec = describe(shape)
    assert spec is not None
    attention = spec.layers[0].attention
    assert attention.rotary is not None
    layer = _random_layer(spec)
    described = NativeSpec(
        width=spec.width,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        vocab_size=spec.vocab_size,
        max_positions=spec.max_positions,
        rotary=attention.rotary,
        embedding=noise(spec.vocab_size, spec.width),
        final_norm=torch.ones(spec.width),
        layers=[layer] * len(spec.layers),
        epsilon=spec.norm.eps,
    )
    return NativeModel(described, "random weights", quantization=quantization)


def _random_layer(spec: DecoderSpec) -> LayerWeights:
    attention, inner = spec.layers[0].attention, spec.layers[0].dense.width
    return LayerWeights(
        qkv=LinearWeights(noise(attention.query_width + 2 * attention.kv_width, spec.width)),
        attention_out=LinearWeights(noise(spec.width, attention.query_width)),
        gate_up=LinearWeights(noise(2 * inner, spec.width)),
        down=LinearWeights(noise(spec.width, inner)),
        input_norm=torch.ones(spec.width),
        post_norm=torch.ones(spec.width),
        q_norm=torch.ones(attention.head_dim),
        k_norm=torch.ones(attention.head_dim),
    )


def random_drafter(
    target: NativeModel, shape: dict[str, Any], block: BlockSpec, depth: int, quantization: Quantization | None
) -> NativeBlock:
    """A block drafter with ``depth`` layers of the target's shapes, five hidden states, and the target's ends."""
    layers = shape | {"num_hidden_layers": depth}
    taps = tuple(1 + i * (target.layers - 2) // 4 for i in range(5))
    config = HeadConfig(layers, target.width, target.vocab_size, taps, block=block)
    with torch.device("meta"):
        head = BlockHead(config)
    ends = ("embed_tokens.weight", "lm_head.weight")
    state: dict[str, Tensor] = {}
    for name, tensor in head.state_dict().items():
        plain = torch.ones(tensor.shape) if name.endswith("norm.weight") else noise(*tensor.shape)
        state[name] = tensor.bfloat16() if name in ends else plain.bfloat16()
    state |= {"d2t": torch.zeros(target.vocab_size, dtype=torch.int64), "t2d": torch.ones(target.vocab_size).bool()}
    head.load_state_dict(state, assign=True)
    made = head.requires_grad_(False)
    return NativeBlock(made, "random drafter", taps, target.max_positions, quantization=quantization, target=target)


class Bench:
    """Rounds and drafts of an engine, on rows of ``CONTEXT`` random tokens that belong to no request."""

    def __init__(self, target: NativeModel, drafter: NativeBlock, rows: int, accepted: int) -> None:
        config = EngineConfig(
            drafter="feature", num_speculative_tokens=8, max_batch_size=rows, max_model_len=CONTEXT + 64, device="cpu"
        )
        self.parts, self._accepted = Engine(Models(target, drafter), config).parts, accepted
        self.batch = Batch(rows, CONTEXT + 64, target.vocab_size, target.device, cpu_ops(target.device))
        native = NativeRound.of(self.parts.target, self.batch, self.parts.accept)
        assert native is not None
        self._native = native
        for decoder in (self.parts.target, *self.parts.drafter.decoders):
            decoder.cache.randomise(rows, CONTEXT, torch.Generator().manual_seed(0))

    def _begin(self, rows: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=60)
        self.batch.set_live(())
        for row in range(rows):
            tokens = torch.randint(self.batch.vocab_size, (CONTEXT,)).tolist()
            self.batch.set_row(row, RowStart(tokens, params, seed=row))
        self.batch.set_live(range(rows))
        self.parts.target.pretend(rows, CONTEXT - 1)
        for decoder in self.parts.drafter.decoders:
            decoder.pretend(rows, CONTEXT - 1 - self._accepted - 1)

    def plain(self, rows: int) -> float:
        """Milliseconds of a round without drafts."""
        return self._timed(rows, lambda: self._native.run(empty_draft(rows)))

    def draft(self, rows: int, k: int) -> float:
        """Milliseconds of a draft of k tokens."""
        return self._timed(rows, lambda: self.parts.drafter.propose(self.batch, SpeculationPlan(k)).draft_tokens)

    def _timed(self, rows: int, run: Callable[[], object]) -> float:
        self._begin(rows)
        started = time.perf_counter()
        run()
        return 1000 * (time.perf_counter() - started)


@torch.inference_mode()
def measure(bench: Bench, rows: Sequence[int], drafted: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Median milliseconds of plain rounds and drafts, by number of rows."""
    plain: dict[int, list[float]] = {size: [] for size in rows}
    draft: dict[tuple[int, int], list[float]] = {(size, k): [] for size in rows for k in drafted}
    for turn in range(repeats + 1):
        for size in rows:
            ms = bench.plain(size)
            drafts = {k: bench.draft(size, k) for k in drafted}
            if turn:  # the first one warms up
                plain[size].append(ms)
                for k, found in drafts.items():
                    draft[size, k].append(found)
    results = []
    for size in rows:
        whole, parts = statistics.median(plain[size]), [statistics.median(draft[size, k]) for k in drafted]
        shares = [round(ms / whole, 3) for ms in parts]
        results.append(
            {"rows": size, "plain_ms": round(whole, 2), "draft_ms": [round(ms, 2) for ms in parts], "share": shares}
        )
    return results


def main(arguments: Sequence[str] | None = None, shape: dict[str, Any] = QWEN3_8B) -> None:
    """Make the models, time, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=list(DRAFTERS), default="dflash")
    parser.add_argument("--block", type=int, default=16, help="rows of a block")
    parser.add_argument("--layers", type=int, default=5, help="of the drafter")
    parser.add_argument("--target-layers", type=int, default=shape["num_hidden_layers"])
    parser.add_argument("--quantization", choices=["int8", "int4", "none"], default="int8")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--drafted", type=int, nargs="+", default=list(range(1, 9)))
    parser.add_argument("--accepted", type=int, default=2, help="tokens that the round before accepted")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    quantization = None if options.quantization == "none" else options.quantization
    torch.manual_seed(0)
    target = random_target(shape | {"num_hidden_layers": options.target_layers}, quantization)
    block = BlockSpec(options.block, mask_token=target.vocab_size - 1, **DRAFTERS[options.kind])
    drafter = random_drafter(target, shape, block, options.layers, quantization)
    bench = Bench(target, drafter, max(options.rows), options.accepted)
    found = {
        "weights": "random",
        "target": {**shape, "num_hidden_layers": options.target_layers},
        "drafter": {"kind": options.kind, "layers": options.layers, "block": options.block},
        "quantization": options.quantization,
        "machine": machine(torch.get_num_threads()),
        "accepted": options.accepted,
        "drafted": options.drafted,
        "costs": measure(bench, options.rows, options.drafted, options.repeats),
    }
    end(found, options.output)


if __name__ == "__main__":
    main()
