"""Latent attention (MLA) in torch, in the absorbed form of ``description.latent``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from paceline.kernels.attention.base import Attend, AttentionTerms
from paceline.models.description.latent import latent_of
from paceline.models.description.spec import AttentionSpec
from paceline.models.torch.linear import Linear
from paceline.models.torch.rotary import Rotation, rotate


class PassContext(Protocol):
    """What latent attention needs of a forward pass; ``layers.ForwardContext`` describes it."""

    @property
    def rows(self) -> int: ...

    @property
    def rotations(self) -> Sequence[Rotation]: ...

    @property
    def attend(self) -> Attend: ...


@dataclass(frozen=True)
class LatentMatrices:
    """The weights of ``LatentAttention`` besides its linear layers. H heads, R rank, K, V widths of a key and a value.

    absorb [H, R, K], expand [H, V, R]: see ``latent.by_head``. norm [R], query_norm [query_rank] or None.
    """

    absorb: Tensor
    expand: Tensor
    norm: Tensor
    query_norm: Tensor | None


class LatentAttention:
    """Latent attention of one layer.

    qkv: of the layer's input; query_up: from the queries' vector, or None; output: of all heads.
    place: its layer of the cache. rotary: number of its rotary positions.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        place: int,
        rotary: int,
        linears: tuple[Linear, Linear | None, Linear],
        weights: LatentMatrices,
    ) -> None:
        self.spec, self.latent, self.place, self.rotary = spec, latent_of(spec), place, rotary
        self.qkv, query_up, self.output = linears
        self.weights, self.terms = weights, AttentionTerms(spec.scale, spec.window)
        self.linears: tuple[str, ...] = ("qkv", "output")
        if query_up is not None:
            self.query_up = query_up
            self.linears = ("qkv", "query_up", "output")

    def __call__(self, x: Tensor, forward: PassContext) -> Tensor:
        """Attention over the cache: x [N, width] -> [N, width]."""
        spec, latent, weights = self.spec, self.latent, self.weights
        first = self.qkv(x)
        own = first.shape[-1] - latent.rank - latent.rotary_dim
        queries, vector, shared = first.split_with_sizes([own, latent.rank, latent.rotary_dim], -1)
        if weights.query_norm is not None:
            queries = self.query_up(self._normed(queries, weights.query_norm))
        still, turned = queries.view(len(x), spec.heads, -1).split_with_sizes([latent.key_dim, latent.rotary_dim], -1)
        absorbed = torch.einsum("nhk,hrk->nhr", still, weights.absorb)
        key = torch.cat([shared, self._normed(vector, weights.norm)], -1)[:, None]
        heads = torch.cat([torch.cat([turned, absorbed], -1), key], 1)
        heads = heads.view(forward.rows, -1, *heads.shape[1:])
        q, k = rotate(heads, forward.rotations[self.rotary]).transpose(1, 2).split_with_sizes([spec.heads, 1], 1)
        out = forward.attend(self.place, q, k, k[..., latent.rotary_dim :], self.terms)
        mixed = out.transpose(1, 2).reshape(len(x), spec.heads, latent.rank)
        return self.output(torch.einsum("nhr,hvr->nhv", mixed, weights.expand).flatten(1))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.latent.norm_eps)
