r"""How far Algorithm 1 gets on a convex loss: Theorem 3.1; ``nonconvex`` has Theorems B.1 and 3.2.

Every bound comes as its terms. ``*_printed`` are the paper's formulas; the others are what we can prove, with every
constant, for any step size. Steps of the printed proof that do not hold as written (``docs/theory.md`` has more):

- the recursion for the gaps w_k - w_{k-1} leaves out the padding, and treats later gradients as independent of earlier
  mixing coefficients, which they are not;
- padding as in lines 6 to 8 of Algorithm 1 adds up to tau^2/4 to the variance of a coordinate, not tau^2/12: the gap
  itself is stretched. Widening to exactly tau adds at most tau^2/12.

The repair conditions on the past. With h the step size, gap the last difference of states and m the mean gradient,

    E |w_{k+1} - w_k|^2 = |gap/2 + h m|^2 + |gap|^2/12 + padding + h^2 (variance of sampling and noise)
                       <= |gap|^2/2 + h^2 (5/2 |m|^2 + variance) + padding,

and the mixed point is nearer to any w* than the two states are on average, by |gap|^2/6. That gain pays for the
curvature whenever h <= 1/(3 beta), and no term in 1/T is left.

Units: gradients are **averaged** (sums over the batch divided by n*q), so the step size h is the paper's eta * n * q,
and the noise is that of the average.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from modelmix._checks import at_least_zero, positive, rate, whole
from modelmix.accounting.mechanism import Mechanism
from modelmix.errors import ModelMixError

PADDINGS: Mapping[str, float] = MappingProxyType({"exact": 1.0, "paper": 3.0})
"""Twelve times the variance that padding adds to a coordinate, at most, over tau^2."""


@dataclass(frozen=True)
class Setting:
    """What is run, in averaged units.

    Args:
        n: samples.
        sample_rate: q.
        dimension: d, trained coordinates.
        steps: T.
        step_size: h = eta * n * q, the step for averaged gradients.
        noise_std: standard deviation of every coordinate of Delta / (n*q).
        tau: mixing threshold, the same at every step.
        padding: "exact" (gaps are widened to tau) or "paper" (to |gap| + tau).
        mixing: False for plain DP-SGD.
    """

    n: int
    sample_rate: float
    dimension: int
    steps: int
    step_size: float
    noise_std: float = 0.0
    tau: float = 0.0
    padding: str = "exact"
    mixing: bool = True

    def __post_init__(self) -> None:
        whole("n", self.n, "the number of samples", least=1)
        rate("q", self.sample_rate, "the sampling rate")
        whole("d", self.dimension, "the number of trained coordinates", least=1)
        whole("steps", self.steps, "the number of steps", least=1)
        positive("h", self.step_size, "the step size")
        at_least_zero("noise", self.noise_std, "the standard deviation of the noise")
        at_least_zero("tau", self.tau, "the mixing threshold")
        if self.padding not in PADDINGS:
            raise ModelMixError(f"padding = {self.padding!r} is unknown: choose one of {', '.join(PADDINGS)}.")
        if self.tau > 0 and not self.mixing:
            raise ModelMixError("tau > 0 without mixing says two things: leave tau out, or mix.")

    @classmethod
    def of(cls, mechanism: Mechanism, *, clip: float, n: int, dimension: int, steps: int, step_size: float) -> Setting:
        """The setting in which a mechanism trains: noise z*c/(n*q), threshold tau = omega * c * h / (n*q)."""
        unit = positive("c", clip, "the clip") / (mechanism.sample_rate * n)
        noise = math.sqrt(mechanism.noise.variance) * unit
        tau = mechanism.mixing_width * unit * step_size
        return cls(n, mechanism.sample_rate, dimension, steps, step_size, noise, tau, mixing=mechanism.mixed)

    @property
    def noise_power(self) -> float:
        """E |Delta|^2 / (n*q)^2."""
        return self.dimension * self.noise_std**2

    @property
    def padding_power(self) -> float:
        """What padding adds to E |w_k|^2 in one step, at most."""
        return PADDINGS[self.padding] * self.dimension * self.tau**2 / 12

    def sampling_power(self, bound: float) -> float:
        """Variance of the averaged gradient under Poisson sampling when no sample's gradient is longer than ``bound``.

        q(1-q) n bound^2 / (n*q)^2. The paper bounds the whole second moment by (bound/q)^2 instead.
        """
        return bound**2 * (1 - self.sample_rate) / (self.sample_rate * self.n)


@dataclass(frozen=True)
class Bound:
    """A bound as its terms, by name, in the order of the theorem."""

    terms: Mapping[str, float]

    @property
    def total(self) -> float:
        return math.fsum(self.terms.values())


def _curvature(lipschitz: float, smoothness: float, distance: float) -> None:
    positive("L", lipschitz, "the bound on gradients")
    positive("beta", smoothness, "the smoothness")
    at_least_zero("W0", distance, "the initial distance")


def convex(setting: Setting, *, lipschitz: float, smoothness: float, distance: float) -> Bound:
    r"""E[F(w_bar) - F(w*)], and the mean of F along the way, for convex F: Theorem 3.1 with constants that hold.

    Every f is convex, beta-smooth with gradients of norm at most L = c, and both initial states are within ``distance``
    of w*. w_bar is the mean of (w_{k-1} + w_{k-2})/2 (mixing), or of w_{k-1} (without).
    """
    _curvature(lipschitz, smoothness, distance)
    s, h, t = setting, setting.step_size, setting.steps
    variance = s.sampling_power(lipschitz) + s.noise_power
    if not s.mixing:
        start = distance**2 / (2 * h * t)
        return Bound({"start": start, "gradients": h / 2 * (lipschitz**2 + s.sampling_power(lipschitz)),
                      "noise": h / 2 * s.noise_power})  # fmt: skip
    gaps = 2 * (2 * distance) ** 2 / t + h * h * (5 * lipschitz**2 + 2 * variance) + 2 * s.padding_power
    return Bound(
        {
            "start": 3 * distance**2 / (4 * h * t),
            "mixing": s.padding_power / (2 * h),
            "gradients": h / 2 * (lipschitz**2 + s.sampling_power(lipschitz)),
            "noise": h / 2 * s.noise_power,
            "gaps": max(0.0, smoothness / 4 - 1 / (12 * h)) * gaps,
        }
    )


def convex_printed(setting: Setting, *, lipschitz: float, smoothness: float, distance: float) -> Bound:
    """Theorem 3.1 as printed, with gamma = h * sqrt(T) and E|Delta| at most sqrt(E|Delta|^2)."""
    _curvature(lipschitz, smoothness, distance)
    s, t, q = setting, setting.steps, setting.sample_rate
    gamma = s.step_size * math.sqrt(t)
    noise = s.noise_power * q * q  # E|Delta|^2 / n^2
    return Bound(
        {
            "start": 3 * distance**2 / (2 * gamma * math.sqrt(t)),
            "mixing": t * s.dimension * s.tau**2 / 12 / (2 * gamma * math.sqrt(t)),
            "gradients": gamma * lipschitz**2 / q**2 / math.sqrt(t),
            "noise": gamma * noise / q**2 / math.sqrt(t),
            "gaps": smoothness
            * (
                12 * distance**2 / (8 * t)
                + 2 * gamma * distance * (lipschitz + math.sqrt(noise)) / (q * t**1.5)
                + 11 * gamma**2 * (lipschitz**2 + noise) / (8 * t * q * q)
            ),
        }
    )


def best_convex_step(setting: Setting, *, lipschitz: float, smoothness: float, distance: float) -> float:
    """The step size h that makes ``convex`` smallest, tau/h held fixed; h = gamma/sqrt(T) as in the theorem."""
    from scipy import optimize  # a fifth of a second, which other commands need not wait for

    ratio = setting.tau / setting.step_size

    def total(log_h: float) -> float:
        h = math.exp(log_h)
        changed = replace(setting, step_size=h, tau=ratio * h)
        return convex(changed, lipschitz=lipschitz, smoothness=smoothness, distance=distance).total

    scale = math.log(distance / (lipschitz * math.sqrt(setting.steps)))
    found = optimize.minimize_scalar(total, bounds=(scale - 15, scale + 5), method="bounded", options={"xatol": 1e-6})
    return math.exp(float(found.x))
