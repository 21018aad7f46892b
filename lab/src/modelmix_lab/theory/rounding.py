"""Stochastic rounding to bf16, fp8 and the like: free after the noise, a cost before it, and never noise itself.

It is not independent of what it rounds: a value on the grid is not randomised at all. Only subtractive dither is
additive, and is exactly mixing over one grid spacing.
"""

from __future__ import annotations

import math
from typing import NoReturn

from modelmix._checks import positive, whole
from modelmix.accounting.mechanism import Mechanism
from modelmix.errors import ModelMixError, UnprovedError
from modelmix_lab.theory.counterexamples import ADDED

FORMATS = {"bf16": 7, "fp8-e4m3": 3, "fp8-e5m2": 2, "fp16": 10}
"""Bits behind the point of the significand."""


def spacing(number_format: str, largest: float) -> float:
    """Distance of neighbouring numbers of a format at size ``largest``: 2^(floor(log2 largest) - bits)."""
    if number_format not in FORMATS:
        raise ModelMixError(f"format = {number_format!r} is unknown: choose one of {', '.join(FORMATS)}.")
    return 2.0 ** (math.floor(math.log2(positive("largest", largest, "the largest size"))) - FORMATS[number_format])


def rounded_after_noise(mechanism: Mechanism) -> Mechanism:
    """Stochastic rounding of the noisy sum or of the state: post-processing. The same mechanism, for free."""
    return mechanism


def rounded_before_noise(mechanism: Mechanism, grid: float, dimension: int) -> Mechanism:
    """Stochastic rounding of the clipped sum before the noise, to a grid of spacing ``grid`` (over the clip): a cost.

    Rounding is monotone in its argument for every draw of its coins, so with the same coins one sample moves a
    coordinate by at most |v_j| + grid, and the vector by at most 1 + grid * sqrt(d). Renyi divergence is jointly
    quasi-convex, so the coins may be fixed: plain Gaussian noise of multiplier z/(1 + grid sqrt(d)).
    """
    if mechanism.mixed or mechanism.law != "gaussian":
        raise UnprovedError(
            "every coordinate of a clipped gradient is bounded",
            "rounding before the noise changes which gradients are possible, and mixing counts on them.",
            "Round after the noise, which is free.",
        )
    positive("grid", grid, "the spacing")
    moved = 1 + grid * math.sqrt(whole("d", dimension, "the number of trained coordinates", least=1))
    return Mechanism(mechanism.noise_multiplier / moved, mechanism.sample_rate)


def rounding_as_noise() -> NoReturn:
    """Stochastic rounding counted as randomness that hides: refused."""
    raise UnprovedError(
        ADDED,
        "stochastic rounding depends on what it rounds: two sums that lie on the grid are not randomised at all.",
        "Round after the noise (free), or dither subtractively over one spacing, which is mixing with that width.",
    )


def dithered(mechanism: Mechanism, grid: float) -> Mechanism:
    """Subtractive dither: round(x + U) - U with U uniform over one spacing leaves x plus an independent uniform.

    U must be fresh and secret, and the sum released is x plus that uniform plus noise: ModelMix with omega = ``grid``.
    """
    if mechanism.mixed:
        raise ModelMixError("this mechanism mixes already: the sum of two uniforms is not a uniform.")
    positive("grid", grid, "the spacing")
    return Mechanism(
        mechanism.noise_multiplier, mechanism.sample_rate, grid, mechanism.p, mechanism.law, mechanism.dimension
    )
