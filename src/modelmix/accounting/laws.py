"""Noise laws of one coordinate, as immutable values.

Lengths are in units of the clip: the gradient of one sample moves a coordinate by at most 1. A law is symmetric
about zero. Given the released states, a step of ModelMix adds to every coordinate of the clipped gradient sum

    base noise (Gaussian or Laplace)  +  uniform on [-omega/2, omega/2]          (Theorem 4.1)

which is ``Mixed(base, omega)``. To study another randomisation (Section 4.5 of the paper) write one small subclass of
``Law``; the accountant checks the facts its proof needs before it gives such a law an epsilon (see ``facts``).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy import special

from modelmix._checks import LARGEST, at_least_zero, positive
from modelmix.accounting.functions import Array, log_exp_minus_line, log_expm1
from modelmix.errors import ModelMixError

_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
_LEGENDRE_X, _LEGENDRE_W = np.polynomial.legendre.leggauss(14)


class Law(ABC):
    """A symmetric density on the line.

    ``norm`` names the norm in which gradients are clipped when this noise is added: 2 for the Gaussian, 1 for the
    Laplace law. A law that is not of this module is checked on a grid when an epsilon is asked for.
    """

    norm: ClassVar[int]

    @property
    @abstractmethod
    def scale(self) -> float:
        """A length over which the log-density changes by about one; quadrature panels start at this size.

        A feature narrower than this must be announced by ``kinks``: no grid can find what it is not told of.
        """

    @property
    @abstractmethod
    def variance(self) -> float:
        """Variance of one coordinate, in squared clips."""

    @property
    def kinks(self) -> tuple[float, ...]:
        """Points where the density is not smooth, or where a flat stretch ends. At least one point."""
        return (0.0,)

    @abstractmethod
    def log_density(self, x: Array, origin: float = 0.0) -> Array:
        """Log-density at ``origin + x``.

        The two summands stay apart so that a law with a far-away kink can be evaluated near it without rounding.
        """

    @abstractmethod
    def sample(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> Array:
        """Independent draws, for tests and audits; never for training."""

    def log_mass(self, lower: Array, upper: Array, width: float) -> Array:
        """log P(lower < X < upper), accurate for short intervals and deep tails. Needed only to be mixed.

        ``width`` is upper - lower before rounding: for a short interval far out the difference has few digits.
        """
        raise ModelMixError(f"{type(self).__name__} cannot be mixed: define log_mass(lower, upper, width) on it.")


@dataclass(frozen=True)
class _Noise(Law):
    """A law with one parameter, its scale z over the clip."""

    z: float

    def __post_init__(self) -> None:
        positive("z", self.z, "the noise multiplier", most=LARGEST)

    @property
    def scale(self) -> float:
        return self.z

    def _from_the_left(self, lower: Array, upper: Array) -> tuple[Array, Array]:
        """The interval over z, reflected if need be so that its middle is not right of zero: the law is symmetric."""
        flip = lower + upper > 0
        return np.where(flip, -upper, lower) / self.z, np.where(flip, -lower, upper) / self.z


@dataclass(frozen=True)
class Gaussian(_Noise):
    """N(0, z^2): the noise of DP-SGD. ``z`` is the standard deviation divided by the l2 clip."""

    norm: ClassVar[int] = 2

    @property
    def variance(self) -> float:
        return self.z**2

    def log_density(self, x: Array, origin: float = 0.0) -> Array:
        y = (x + origin) / self.z
        return -0.5 * y * y - _LOG_SQRT_2PI - math.log(self.z)

    def sample(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> Array:
        return rng.normal(0.0, self.z, size)

    def log_mass(self, lower: Array, upper: Array, width: float) -> Array:
        a, b = self._from_the_left(lower, upper)  # where log_ndtr keeps its relative accuracy
        middle, half = 0.5 * (a + b), 0.5 * width / self.z
        out = np.empty_like(a)
        # The difference of two cumulative values cancels when the interval is short; there the density is nearly
        # constant and fourteen Gauss points integrate it to rounding.
        short = half * np.maximum(1.0, np.abs(middle)) < 0.5
        m, t = middle[short], half * _LEGENDRE_X
        flatness = np.exp(-m[:, None] * t - 0.5 * t * t) @ _LEGENDRE_W
        out[short] = -0.5 * m * m - _LOG_SQRT_2PI + math.log(half) + np.log(flatness)
        top = special.log_ndtr(b[~short])
        out[~short] = top + np.log1p(-np.exp(special.log_ndtr(a[~short]) - top))
        return out

    def exact_log_excess(self, shift: float, k: Array) -> Array:
        """log(A_k(shift) - 1) for orders k > 1."""
        ratio = shift / self.z
        with np.errstate(over="ignore"):
            return log_expm1(0.5 * k * (k - 1) * ratio * ratio)


@dataclass(frozen=True)
class Laplace(_Noise):
    """Density exp(-|x|/z) / (2z). ``z`` is the scale (not the standard deviation) divided by the l1 clip.

    Alone, one step is 1/z-differentially private.
    """

    norm: ClassVar[int] = 1

    @property
    def variance(self) -> float:
        return 2 * self.z**2

    def log_density(self, x: Array, origin: float = 0.0) -> Array:
        return -np.abs(x + origin) / self.z - math.log(2 * self.z)

    def sample(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> Array:
        return rng.laplace(0.0, self.z, size)

    def log_mass(self, lower: Array, upper: Array, width: float) -> Array:
        a, b = self._from_the_left(lower, upper)
        # a + b <= 0. Either both ends are left of zero, or the interval straddles it.
        left = b + math.log(-0.5 * math.expm1(-width / self.z))
        straddling = np.log(-0.5 * (np.expm1(-np.maximum(b, 0.0)) + np.expm1(np.minimum(a, 0.0))))
        return np.where(b <= 0, left, straddling)

    def exact_log_excess(self, shift: float, k: Array) -> Array:
        """log(A_k(shift) - 1) for orders k > 1."""
        # A_k = (k e^((k-1)s) + (k-1) e^(-ks)) / (2k-1); the terms of first order cancel, so they are left out.
        s = abs(shift) / self.z
        grow = np.log(k) + log_exp_minus_line((k - 1) * s)
        fall = np.log(k - 1) + log_exp_minus_line(-k * s)
        return np.asarray(np.logaddexp(grow, fall) - np.log(2 * k - 1))

    def max_log_ratio(self, shift: float) -> float:
        """Supremum over x of |log f(x - shift) - log f(x)|; mixing, a mixture of shifts, keeps it."""
        return abs(shift) / self.z


@dataclass(frozen=True)
class Mixed(Law):
    """``base`` plus an independent uniform on [-omega/2, omega/2]: what one coordinate of ModelMix adds.

    ``omega`` is the mixing width in units of the clip, (tau/eta) * B / c with B = q*n.
    Density: P(x - omega/2 < base < x + omega/2) / omega.
    """

    base: Law
    omega: float

    def __post_init__(self) -> None:
        at_least_zero("omega", self.omega, "the mixing width", most=LARGEST)
        if self.omega == 0:
            raise ModelMixError("omega = 0 means no mixing: use the base law itself.")
        if isinstance(self.base, Mixed):
            raise ModelMixError("a law is mixed once: give Mixed a base law that is not mixed.")

    @property
    def norm(self) -> int:  # type: ignore[override]
        return self.base.norm

    @property
    def scale(self) -> float:
        return self.base.scale

    @property
    def variance(self) -> float:
        return self.base.variance + self.omega**2 / 12

    @property
    def kinks(self) -> tuple[float, ...]:
        half = self.omega / 2
        return tuple(sorted({kink + side for kink in self.base.kinks for side in (-half, half)}))

    def log_density(self, x: Array, origin: float = 0.0) -> Array:
        half = self.omega / 2
        mass = self.base.log_mass(x + (origin - half), x + (origin + half), self.omega)
        return mass - math.log(self.omega)

    def sample(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> Array:
        return self.base.sample(rng, size) + rng.uniform(-self.omega / 2, self.omega / 2, size)


def known(law: Law) -> Gaussian | Laplace | None:
    """The noise of a law whose facts and closed forms this package vouches for; None for any other.

    A subclass does not count: it may have changed the density and kept the closed forms.
    """
    noise = law.base if type(law) is Mixed else law
    return noise if type(noise) in (Gaussian, Laplace) else None  # type: ignore[return-value]
