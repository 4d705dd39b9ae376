"""The counter-based noise of ``sampling.py`` inside kernels: the same hash bit by bit, the same uniforms in float64.

Also a float32 approximation with a proven bound, because many GPUs have few float64 units. With e = 2^-22:

* A uniform u and 1 - u are exact in float32, if the smaller of them is computed: at most 24 bits, at most 1/2.
* A float32 logarithm is CUDA's logf, off by one unit in the last place, or, if Triton so chooses, lg2.approx times ln
  2, which is worse: lg2.approx is off by e within (1/2, 2), elsewhere by e relative (PTX's manual), and the product
  adds 0.27 e relative, so a logarithm y is off by less than e + 1.27 e |y|.
* -log u, for u < 1/2, is at least log 2: off by 1.27 e relative. For u > 1/2 it is 2 atanh(s) with v = 1 - u and s = v
  / (2 - v) <= 1/3: a division by div.full (2 units in the last place, e) and a rounding before it, 1.17 e, weigh at
  most 1.09 times; its roundings and the series' remainder (1.5e-9) add 0.6 e. Off by less than 2 e relative.
* A relative error of the inner logarithm is an absolute one of the outer. |outer| <= 17.4, reached at u near 1.
  Together less than (2 + 1 + 1.27 * 17.4) e < 25.1 e < 32 e = 2^-17.
"""

from __future__ import annotations

import triton
import triton.language as tl

_GOLDEN = 0x9E3779B9
GUMBEL_ERROR = 2.0**-17  # absolute error of ``near_gumbel``, derived above


def salt(purpose: int) -> int:
    """A purpose's contribution to the hash, as an int32 with the same 32 bits (kernels take their constants signed)."""
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
def bits24(a: tl.tensor, b: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Keys and token broadcast together -> uint32 below 2^24."""
    return mix(mix(a ^ token.to(tl.uint32)) ^ b) >> 8


@triton.jit
def uniform(a: tl.tensor, b: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Keys and token broadcast together -> float64 in (0, 1), 24 bits."""
    return (bits24(a, b, token).to(tl.float64) + 0.5) * (1.0 / 16777216.0)


@triton.jit
def gumbel(a: tl.tensor, b: tl.tensor, token: tl.tensor) -> tl.tensor:
    """-log(-log u), float64."""
    return -tl.log(-tl.log(uniform(a, b, token)))


@triton.jit
def near_gumbel(bits: tl.tensor) -> tl.tensor:
    """float32 approximation of ``gumbel`` for these ``bits24``, off by less than GUMBEL_ERROR."""
    bits = bits.to(tl.int32)
    smaller = tl.minimum(bits, 16777215 - bits)  # near 1, u itself would be rounded to 1
    part = (smaller.to(tl.float32) + 0.5) * (1.0 / 16777216.0)
    s = part / (2.0 - part)
    z = s * s
    series = z * (1.0 / 15.0) + 1.0 / 13.0
    series = series * z + 1.0 / 11.0
    series = series * z + 1.0 / 9.0
    series = series * z + 1.0 / 7.0
    series = series * z + 1.0 / 5.0
    series = series * z + 1.0 / 3.0
    series = series * z + 1.0
    wait = tl.where(bits == smaller, -tl.log(part), 2.0 * s * series)  # -log u
    return -tl.log(wait)
