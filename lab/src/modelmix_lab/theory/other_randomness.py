r"""Randomness beyond noise (Section 4.5): what else a training step adds to a gradient, and what that is worth.

Randomness X that is *added*, *independent* of the samples given the past, and secret, can only help: with the Gaussian
noise N it makes X + N, and epsilon of N alone holds in any case. How much it helps:

- **Langevin noise** is Gaussian: variances add. Every direction is the same.
- **Bounded laws, the same in every coordinate and independent** (``Discrete``, ``bounded``): the accountant's own sum
  over coordinates. One coordinate of size c is the worst gradient if the log-moments are convex in the squared size;
  ``require_convex`` checks that on a grid finer than the noise, and refuses where it fails, as it does for atoms that
  lie farther apart than the noise is wide.

Spheres are in ``sphere``, rounding in ``rounding``, and what gets no number in ``counterexamples``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy import special

from modelmix._checks import at_least_zero, positive
from modelmix.accounting.facts import CHECKED_ORDERS
from modelmix.accounting.laws import Law
from modelmix.accounting.mechanism import Mechanism
from modelmix.accounting.moments import log_moments
from modelmix.errors import ModelMixError, UnprovedError

Array = NDArray[np.float64]
_FINEST = 4000  # points of the grid on which convexity is looked at, at most


def langevin(mechanism: Mechanism, std: float) -> Mechanism:
    """Plain DP-SGD with Langevin noise of standard deviation ``std`` (over the clip) added: z^2 + std^2, exactly."""
    if mechanism.mixed or mechanism.law != "gaussian":
        raise ModelMixError("Langevin noise is added to plain Gaussian noise here: give Mechanism(z, q).")
    at_least_zero("std", std, "the standard deviation of Langevin noise")
    z = math.hypot(mechanism.noise_multiplier, std)
    return Mechanism(z, mechanism.sample_rate, p=mechanism.p, dimension=mechanism.dimension)


def langevin_std(eta: float, temperature: float, clip: float, expected_batch: float) -> float:
    """sqrt(2 * temperature / eta) * B/c: the noise sqrt(2 eta temperature) N(0, 1) of a Langevin step, in our units."""
    positive("eta", eta, "the learning rate")
    at_least_zero("temperature", temperature, "the temperature")
    unit = positive("c", clip, "the clip") / positive("B", expected_batch, "the expected batch")
    return math.sqrt(2 * temperature / eta) / unit


@dataclass(frozen=True)
class Discrete(Law):
    """N(0, z^2) plus an atom: one of ``values`` with its probability, independently in every coordinate.

    Lengths over the clip. The atoms must be symmetric about zero.
    """

    z: float
    values: tuple[float, ...]
    weights: tuple[float, ...]
    norm: ClassVar[int] = 2

    def __post_init__(self) -> None:
        positive("z", self.z, "the noise multiplier")
        if len(self.values) != len(self.weights) or not self.values or min(self.weights) < 0:
            raise ModelMixError("a discrete law has as many weights, 0 or more, as values, and at least one.")
        if not abs(math.fsum(self.weights) - 1) < 1e-12:
            raise ModelMixError(f"the weights of a discrete law add up to 1, not {math.fsum(self.weights):.6g}.")
        pairs = sorted(zip(self.values, self.weights, strict=True))
        mirrored = sorted((-value, weight) for value, weight in pairs)
        if not np.allclose(pairs, mirrored, rtol=1e-9, atol=1e-12):
            raise UnprovedError(
                "the noise is symmetric about zero", "the atoms of this law are not.", "Use a symmetric law."
            )

    @property
    def scale(self) -> float:
        return self.z

    @property
    def variance(self) -> float:
        return self.z**2 + float(np.dot(np.square(self.values), self.weights))

    @property
    def kinks(self) -> tuple[float, ...]:
        return tuple(sorted({0.0, min(self.values), max(self.values)}))

    def log_density(self, x: Array, origin: float = 0.0) -> Array:
        y = (np.asarray(x)[..., None] + origin - np.array(self.values)) / self.z
        logs = -0.5 * y * y + np.log(np.maximum(self.weights, 1e-300))
        return np.asarray(special.logsumexp(logs, axis=-1) - 0.5 * math.log(2 * math.pi) - math.log(self.z))

    def sample(self, rng: np.random.Generator, size: int | tuple[int, ...]) -> Array:
        atoms = rng.choice(np.array(self.values), size, p=np.array(self.weights))
        return np.asarray(rng.normal(0.0, self.z, size) + atoms)


def bounded(z: float, density: Callable[[Array], Array], bound: float) -> Discrete:
    """N(0, z^2) plus a random number with a symmetric density on [-bound, bound], independently in every coordinate.

    Gauss-Legendre points stand for the density, which must be smooth on either side of zero. Convolved with a Gaussian
    the difference is tiny; it is measured against twice as many points, and 1e-9 or more is refused.
    """
    positive("bound", bound, "the bound")
    points = 20 + math.ceil(4 * bound / positive("z", z, "the noise multiplier"))
    if points > 1000:
        raise ModelMixError(f"a bound of {bound / z:.0f} standard deviations of the noise is too wide: at most 245.")
    law, finer = (_atoms(z, density, bound, count) for count in (points, 2 * points))
    x = np.linspace(0, bound + 8 * z, 400)
    if not np.max(np.abs(law.log_density(x) - finer.log_density(x))) < 1e-9:
        raise UnprovedError(
            "the moments of the noise are known with an error bound",
            "the density has kinks between 0 and its bound, and the quadrature did not settle.",
            "Give a density that is smooth there, or a Discrete law.",
        )
    return law


def _atoms(z: float, density: Callable[[Array], Array], bound: float, points: int) -> Discrete:
    x, w = np.polynomial.legendre.leggauss(points)
    half = 0.5 * bound * (x + 1)
    right, left = (np.asarray(density(side * half)) * w * bound / 2 for side in (1.0, -1.0))
    if not np.allclose(right, left, rtol=1e-9, atol=1e-12):
        raise UnprovedError("the noise is symmetric about zero", "this density is not.", "Use a symmetric law.")
    total = 2 * float(right.sum())
    if not abs(total - 1) < 1e-6:
        raise ModelMixError(f"the density integrates to {total:.6g} on [-bound, bound], not to 1.")
    weights = np.concatenate([right[::-1], right]) / total
    return Discrete(z, (*(-half[::-1]), *half), tuple(weights / math.fsum(weights)))


def require_convex(law: Law, bound: float = 1.0) -> None:
    """Raises ``UnprovedError`` unless log A_k is convex and rising in |v|^2 on (0, bound], four points to a scale."""
    points = max(25, math.ceil(4 * bound / law.scale))
    if points > _FINEST:
        raise UnprovedError(
            "one coordinate of size c is the worst gradient",
            f"the noise of {type(law).__name__} is too narrow ({law.scale:.2g} of the clip) to look at every shift.",
            "Use more Gaussian noise; epsilon of the Gaussian alone always holds.",
        )
    x = np.linspace(0.0, bound**2, points)
    orders = CHECKED_ORDERS[CHECKED_ORDERS * bound <= 60 * law.scale]
    orders = orders if orders.size else CHECKED_ORDERS[:1]
    h = np.array([log_moments(law, math.sqrt(v), orders) for v in x])
    if not (np.all(np.diff(h, 2, axis=0) >= -1e-8 * h[-1]) and np.all(np.diff(h, axis=0) >= -1e-8 * h[-1])):
        raise UnprovedError(
            "one coordinate of size c is the worst gradient",
            f"the moments of this {type(law).__name__} law are not convex in the squared size of a coordinate: some "
            "other gradient is worse.",
            "Let atoms lie closer together than the noise is wide; epsilon of the Gaussian alone always holds.",
        )


@dataclass(frozen=True)
class Fixed:
    """A law as a function of z, for a ``Mechanism``: the law it was made with, at its own z only."""

    law: Discrete

    def __call__(self, z: float) -> Law:
        if z != self.law.z:
            raise ModelMixError(f"this law was made for z = {self.law.z:g}: make another for z = {z:g}.")
        return self.law


def coordinatewise(law: Discrete, sample_rate: float, p: int = 1) -> Mechanism:
    """The mechanism of Gaussian noise with this added; refused unless its worst gradient is known."""
    require_convex(law, 1 / math.sqrt(p))
    return Mechanism(law.z, sample_rate, p=p, law=Fixed(law))
