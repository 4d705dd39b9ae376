"""A model divided among ranks. Rank 0's part is a ``Model`` like any other; the others follow it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from paceline.config import AttentionName
from paceline.kernels.attention import BACKENDS
from paceline.kernels.attention.base import Attend
from paceline.kernels.attention.cached import CachedAttend
from paceline.models.base import HiddenStates
from paceline.models.description.spec import DecoderSpec
from paceline.models.parallel.group import Ranks
from paceline.models.parallel.leading import CacheShape, Leading, MirroredCache, RankProcesses
from paceline.models.parallel.plan import Op, Step, packed_pass
from paceline.models.torch.experts import Experts
from paceline.models.torch.linear import Linear
from paceline.models.torch.transformer import Transformer

BACKEND_NAMES = cast(tuple[AttentionName, ...], tuple(BACKENDS))


class SummedLinear:
    """A linear layer divided by columns, whose outputs all ranks sum."""

    def __init__(self, part: Linear, ranks: Ranks) -> None:
        self._part, self._ranks = part, ranks

    def __call__(self, x: Tensor) -> Tensor:
        return self._ranks.add_up(self._part(x))

    def tensors(self) -> tuple[Tensor, ...]:
        return self._part.tensors()


class EmbeddingShard:
    """Some rows of an embedding that is also the head."""

    def __init__(self, weight: Tensor, rows: range) -> None:
        self._weight, self._rows = weight, weight[rows.start : rows.stop]

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._rows)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self._weight,)


class PartOfModel(Transformer):
    """A rank's part: its forward pass gives the whole model's result, if all ranks run it together.

    spec: of the whole model; weights: of this part (``load.loading.load_shard``).
    """

    paged = False

    def __init__(self, spec: DecoderSpec, weights: Mapping[str, Tensor], name: str, ranks: Ranks) -> None:
        super().__init__(ranks.share.local(spec), weights, name)
        self.ranks, self.hidden_width = ranks, spec.embed_width
        for block in self._blocks:
            block.attention.output = SummedLinear(block.attention.output, ranks)
            assert block.mlp is not None, "check_shardable refuses layers of one part"
            assert not isinstance(block.mlp, Experts), "check_shardable refuses them"
            block.mlp.down = SummedLinear(block.mlp.down, ranks)
        if spec.tied:
            self._head = EmbeddingShard(self._embedding, ranks.share.of(spec.vocab_size))
        self.precision += f", cut into {ranks.share.ranks} ranks ({ranks.name})"

    def cache_shape(self, rows: int, positions: int) -> CacheShape:
        """``KVCache``'s arguments, for the heads of this part."""
        return self.kv_layers, rows, positions, self.dtype, self.device

    def run_head(self, hidden: Tensor) -> Tensor | None:
        """Hidden [N, width] -> logits [N, vocab_size] in float32 on rank 0, None on others."""
        sizes = [len(share.of(self.vocab_size)) for share in self.ranks.share.all()]
        own = self._head(hidden)
        parts = self.ranks.collect(functional.pad(own, (0, max(sizes) - own.shape[-1])))
        if not parts:
            return None
        return self.scaled(torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], 1).float())


class LeadingPart(PartOfModel, Leading):
    """Rank 0's part."""

    def __init__(
        self, spec: DecoderSpec, weights: Mapping[str, Tensor], name: str, ranks: Ranks, processes: RankProcesses
    ) -> None:
        super().__init__(spec, weights, name, ranks)
        self.lead(processes)

    def hidden_states(
        self, tokens: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int] = ()
    ) -> HiddenStates:
        assert isinstance(attend, CachedAttend)
        assert isinstance(attend.cache, MirroredCache)
        plan, backend = attend.plan, BACKEND_NAMES.index(attend.backend.name)
        first = attend.rows.first
        numbers = attend.cache.number, backend, -1 if first is None else first, plan.longest
        packed = packed_pass(attend.rows.index, tokens, positions, plan.ancestors)
        with self.on_all_ranks(Step(Op.FORWARD, numbers, packed)):
            return super().hidden_states(tokens, positions, attend, taps)

    def logits(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        with self.on_all_ranks(Step(Op.HEAD, (len(flat),))):
            self.ranks.send(flat)
            logits = self.run_head(flat)
        assert logits is not None
        return logits.view(*hidden.shape[:-1], -1)


__all__ = ["BACKEND_NAMES", "LeadingPart", "PartOfModel"]
