"""The counter-based noise of ``sampling.py`` inside kernels: the same hash bit by bit, the same uniforms in float64."""

from __future__ import annotations

import triton
import triton.language as tl

_GOLDEN = 0x9E3779B9


def salt(purpose: int) -> int:
    """What a purpose adds to the hash, as an int32 holding the 32 bits (kernels take their constants signed)."""
    word = (_GOLDEN * purpose) & 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word


@triton.jit
def mix(x: tl.tensor) -> tl.tensor:
    """lowbias32 on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def noise_key(seed: tl.tensor, position: tl.tensor, salt: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """seed and position int64, salt int32 -> two uint32 words."""
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    place = position.to(tl.uint32)
    salted = salt.to(tl.uint32)
    a = mix(mix(mix(low ^ salted) ^ high) ^ place)
    b = mix(mix(mix(high ^ 0x85EBCA6B) ^ low) ^ place ^ salted)
    return a, b


@triton.jit
def uniform(a: tl.tensor, b: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Keys and token broadcast together -> float64 in (0, 1), 24 bits."""
    h = mix(mix(a ^ token.to(tl.uint32)) ^ b)
    return ((h >> 8).to(tl.float64) + 0.5) * (1.0 / 16777216.0)


@triton.jit
def gumbel(a: tl.tensor, b: tl.tensor, token: tl.tensor) -> tl.tensor:
    """-log(-log u), float64."""
    return -tl.log(-tl.log(uniform(a, b, token)))
