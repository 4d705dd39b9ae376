"""Cuts that follow from the shape of the whole distribution: typical sampling, epsilon, eta and top-n-sigma.

They come before min-p, top-k and top-p, and all look at the same distribution: after penalties and temperature.
A token's depth is its distance below the largest logit, after temperature; its surprise is its depth plus a constant,
so each method keeps the tokens up to some depth, or, typical sampling, those near the mean depth:

* epsilon (2210.15191): probability at least ``epsilon_cutoff``.
* eta (2210.15191): probability at least min(eta, sqrt(eta) e^-entropy).
* top-n-sigma (2411.07641): logit at most n standard deviations of all logits below the largest.
* typical (2202.00666): the tokens whose surprise is nearest to the entropy, until they have the mass ``typical_p``.

Sums run over whole numbers, so they do not depend on their order, and the CPU kernels (csrc/truncation.h) compute the
same bits. Shapes: B rows, L positions, V vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.values import Truncation

DEPTH_BITS = 16  # of a depth's fraction in sums: 2^30 of mass times 2^16, in a vocabulary of 2^18, fit an int64
WEIGHTLESS = 22.0  # deeper tokens have no mass
SPREAD_BITS = 12  # of a distance's fraction in its variance
WIDEST = 1024.0  # a distance counts as at most this much in the variance, whose sum of squares then fits an int64


class Moments(NamedTuple):
    """Sums over a line, int64 [..., 1] each, from which the limits of its tokens follow.

    mass: of all tokens. mass_depth: of mass times depth. finite: number of finite logits. distance, square: of their
    distances from the largest logit, before temperature. The depths and distances are whole numbers
    (``DEPTH_BITS``, ``SPREAD_BITS``).
    """

    mass: Tensor
    mass_depth: Tensor
    finite: Tensor
    distance: Tensor
    square: Tensor

    @staticmethod
    def of(logits: Tensor, depths: Tensor, mass: Tensor) -> Moments:
        """Arguments as for ``truncated``."""
        depth = (depths.clamp(max=WEIGHTLESS) * 2.0**DEPTH_BITS).round().long()
        distance = logits.amax(-1, keepdim=True) - logits
        finite = distance < math.inf
        fixed = (distance.clamp(max=WIDEST) * 2.0**SPREAD_BITS).round().long() * finite
        return Moments(*(each.sum(-1, keepdim=True) for each in (mass, mass * depth, finite, fixed, fixed * fixed)))

    @property
    def mean_depth(self) -> Tensor:
        """Mean depth under the distribution, float64: the entropy less ``log_sum``."""
        return self.mass_depth.double() / self.mass.double() * 2.0**-DEPTH_BITS

    def deepest(self, by: Truncation, temperature: Tensor) -> Tensor:
        """Depth up to which epsilon, eta and top-n-sigma keep tokens, [B, L, 1] float32; infinity without them.

        temperature: [B].
        """
        log_sum = (self.mass.double() * 2.0**-30).log()
        probable = _deepest_probable(by, log_sum, self.mean_depth)
        return torch.minimum(probable, self._within_spread(temperature, by.top_n_sigma))

    def _within_spread(self, temperature: Tensor, sigmas: Tensor) -> Tensor:
        """Depth that lies n standard deviations of the finite logits below the largest; infinity for n = 0."""
        count = self.finite.double()
        mean = self.distance.double() / count
        variance = self.square.double() / count - mean * mean
        spread = variance.clamp(min=0.0).sqrt() * 2.0**-SPREAD_BITS
        n, divisor = (values.double()[:, None, None] for values in (sigmas, temperature))
        return torch.where(n > 0, n * spread / divisor, math.inf).float()


def truncated(logits: Tensor, temperature: Tensor, by: Truncation, depths: Tensor, mass: Tensor) -> Tensor:
    """Set the logits of tokens that are cut to -inf: float32 [B, L, V] -> [B, L, V].

    temperature: [B]; rows at 0 keep every token. depths: [B, L, V] float32. mass: [B, L, V] int64, of e^-depth in units
    of 2^-30. Of the typical tokens (without typical sampling: of all) the most likely one always stays.
    This is the reference implementation of ``gpu.cut.truncate``.
    """
    moments = Moments.of(logits, depths, mass)
    deepest = moments.deepest(by, temperature)
    away = (depths - moments.mean_depth.float()).abs()
    typical = away <= _typical_radius(away, mass, moments.mass, by.typical_p)
    likeliest = depths.masked_fill(~typical, math.inf).amin(-1, keepdim=True)
    kept = typical & (depths <= torch.maximum(deepest, likeliest))
    return logits.masked_fill(~kept & (temperature > 0)[:, None, None], -math.inf)


def _deepest_probable(by: Truncation, log_sum: Tensor, mean: Tensor) -> Tensor:
    """Depth of the least probable token that epsilon and eta keep, [B, L, 1] float32; infinity without either."""
    epsilon, eta = (cutoff.double().log()[:, None, None] for cutoff in (by.epsilon_cutoff, by.eta_cutoff))
    adapted = torch.minimum(eta, 0.5 * eta - (log_sum + mean))  # the entropy is log_sum + mean
    return -(torch.maximum(epsilon, adapted) + log_sum).clamp(max=0.0).float()


def _typical_radius(away: Tensor, mass: Tensor, weight: Tensor, typical_p: Tensor) -> Tensor:
    """Distance from the mean depth within which tokens are typical, [B, L, 1] float32; infinity for typical_p = 1."""
    fraction = typical_p.double()[:, None, None]
    limit = (fraction * weight.double()).clamp(min=1.0)
    ordered, order = away.sort(-1)
    own = mass.gather(-1, order)
    before = (own.cumsum(-1) - own).double()
    radius = ordered.masked_fill(before >= limit, -math.inf).amax(-1, keepdim=True)
    return torch.where(fraction < 1, radius, math.inf)
