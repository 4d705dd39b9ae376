"""The matrices of latent attention, in the order in which backends multiply.

A head's score of a token is its query times a key that a matrix makes from the token's vector. The backends multiply
the query by that matrix instead (the absorbed form; DeepSeek-V2, arXiv 2405.04434, section 2.1.2): then all heads read
the vector itself, and a second matrix of each head is applied to the weighted sum of the vectors. Prompts, drafts
and decoding have one arithmetic, and the cache holds one vector of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.spec import LinearWeights
from paceline.models.description.spec import AttentionSpec, LatentSpec


def latent_of(spec: AttentionSpec) -> LatentSpec:
    """Return what makes the attention latent, as the caller knows it to be."""
    assert spec.latent is not None, "this attention has keys of its own heads"
    return spec.latent


def first_in_order(stored: LinearWeights, spec: AttentionSpec) -> LinearWeights:
    """Return the matrix of the layer's input: of queries or their vector, then of the keys' vector and rotated part."""
    latent = latent_of(spec)

    def order(rows: Tensor) -> Tensor:
        of_keys = [latent.rank, latent.rotary_dim]
        queries, vector, rotated = rows.split_with_sizes([len(rows) - sum(of_keys), *of_keys])
        own = queries if latent.query_rank is not None else _of_queries(queries, spec)
        return torch.cat([own, vector, _halves(rotated)])

    return stored.reordered(order) if spec.interleaved else stored


def queries_in_order(stored: LinearWeights, spec: AttentionSpec) -> LinearWeights:
    """Return the matrix that makes the queries from their vector."""
    return stored.reordered(lambda rows: _of_queries(rows, spec)) if spec.interleaved else stored


def by_head(stored: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Split the matrix [heads * (key_dim + value_dim), rank] of all keys and values.

    Returns what a head's query [key_dim] is multiplied by, [heads, rank, key_dim], and what its weighted sum of vectors
    is multiplied by, [heads, value_dim, rank].
    """
    latent = latent_of(spec)
    keys, values = stored.view(spec.heads, -1, latent.rank).split_with_sizes([latent.key_dim, latent.value_dim], 1)
    return keys.mT, values


def _of_queries(rows: Tensor, spec: AttentionSpec) -> Tensor:
    latent = latent_of(spec)
    heads = rows.view(spec.heads, latent.query_dim, *rows.shape[1:])
    still, rotated = heads.split_with_sizes([latent.key_dim, latent.rotary_dim], 1)
    return torch.cat([still, _halves(rotated, 1)], 1).flatten(0, 1)


def _halves(rows: Tensor, dim: int = 0) -> Tensor:
    """Move neighbours, which turn together, apart by half of the rows."""
    pairs = rows.reshape(*rows.shape[:dim], -1, 2, *rows.shape[dim + 1 :])
    return pairs.transpose(dim, dim + 1).flatten(dim, dim + 1)
