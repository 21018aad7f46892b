r"""How far Algorithm 1 gets: Theorem 3.1 (convex), Theorem B.1 (clipped DP-SGD) and Theorem 3.2 (clipped, mixed).

Every bound comes as its terms. ``*_printed`` are the paper's formulas; the others are what we can prove, with every
constant, for any step size. Three steps of the printed proofs do not hold as written (``docs/theory.md`` has more):

- the recursion for the gaps w_k - w_{k-1} leaves out the padding, and treats later gradients as independent of earlier
  mixing coefficients, which they are not;
- padding as in lines 6 to 8 of Algorithm 1 adds up to tau^2/4 to the variance of a coordinate, not tau^2/12: the gap
  itself is stretched. Widening to exactly tau adds at most tau^2/12;
- Theorems B.1 and 3.2 drop a factor 1/q that their proofs carry, and 3.2 counts R_F where its proof has 3/2 R_F.

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

from modelmix.errors import ModelMixError
from modelmix.privacy.mechanism import Mechanism
from modelmix.privacy.validation import at_least_zero, positive, probability, rate, whole

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


@dataclass(frozen=True)
class Descent:
    """The lemma of Appendix B: E<grad F, CP(g, c)> + a2 >= min(a1 |grad F|^2, a3 |grad F|)."""

    a1: float
    a2: float
    a3: float

    def gradient_norm(self, bound: float) -> float:
        """If the mean over k of E min(a1 x^2, a3 x) is at most ``bound``, then with probability 1/2 or more some state
        has a gradient norm x of this or less (Markov)."""
        return max(math.sqrt(2 * bound / self.a1), 2 * bound / self.a3)


def descent(clip: float, kappa: float, p: float = 4.0) -> Descent:
    """a1, a2, a3 of the lemma for c = p * c0; at p = 4 and c = 4 kappa log 10 they are 9/20, ..., c/20.

    Needs Assumption 2.1 for t >= c/p only, see ``kappa``.
    """
    positive("c", clip, "the clip")
    positive("kappa", kappa, "the tail constant")
    if not p > 2:
        raise ModelMixError(f"p = {p:g} is not allowed: the lemma needs p > 2.")
    c0 = clip / p
    tail = math.exp(-c0 / kappa)
    kept = -math.expm1(-c0 / kappa)
    a3 = clip * (kept * (1 - 1 / (p - 1) - 1 / (p - 2)) - tail)
    if a3 <= 0:
        raise ModelMixError(
            f"c = {clip:g} is too small for kappa = {kappa:g}: nothing is proved below c = 4 kappa log 7 = "
            f"{4 * kappa * math.log(7):.4g}; the theorem asks for 4 kappa log 10 = {4 * kappa * math.log(10):.4g}."
        )
    return Descent(kept / 2, ((c0 + kappa) * tail / kept) ** 2, a3)


def clipped(
    setting: Setting, *, clip: float, kappa: float, smoothness: float, loss_range: float, first_gap: float = 0.0
) -> Bound:
    """Theorems B.1 (without mixing) and 3.2 (with): mean over k of E min(a1 |grad F|^2, a3 |grad F|), any F.

    F is beta-smooth, its values lie within ``loss_range`` = R_F, and Assumption 2.1 holds with ``kappa`` for t >= c/4.
    a1 and a3 are those of ``descent``. ``first_gap`` is |w_0 - w_{-1}|.
    """
    a = descent(clip, kappa)
    positive("beta", smoothness, "the smoothness")
    positive("R_F", loss_range, "the range of the loss")
    at_least_zero("gap", first_gap, "the initial gap")
    s, h, t = setting, setting.step_size, setting.steps
    sampling = s.sampling_power(clip)
    if not s.mixing:
        return Bound(
            {
                "start": loss_range / (t * h),
                "gradients": smoothness * h / 2 * (clip**2 + sampling),
                "noise": smoothness * h / 2 * s.noise_power,
                "clipping": a.a2,
            }
        )
    return Bound(
        {
            "start": 1.5 * loss_range / (t * h),
            "first gap": smoothness * first_gap**2 / (t * h),
            "mixing": 1.5 * smoothness * s.padding_power / h,
            "gradients": smoothness * h * (3.75 * clip**2 + 1.5 * sampling),
            "noise": 1.5 * smoothness * h * s.noise_power,
            "clipping": a.a2,
        }
    )


@dataclass(frozen=True)
class Budget:
    """What the printed Theorems B.1 and 3.2 are stated in: (epsilon, delta) and the problem's constants.

    v, the paper's unnamed constant, is ``noise_constant`` of the noise that is added.
    """

    n: int
    dimension: int
    sample_rate: float
    epsilon: float
    delta: float
    clip: float
    smoothness: float
    loss_range: float

    def __post_init__(self) -> None:
        whole("n", self.n, "the number of samples", least=1)
        whole("d", self.dimension, "the number of trained coordinates", least=1)
        rate("q", self.sample_rate, "the sampling rate")
        positive("epsilon", self.epsilon, "the privacy loss")
        probability("delta", self.delta, "the failure probability")
        positive("c", self.clip, "the clip")
        positive("beta", self.smoothness, "the smoothness")
        positive("R_F", self.loss_range, "the range of the loss")

    @property
    def ratio(self) -> float:
        """sqrt(d log(1/delta)) / (n epsilon), the rate of every private theorem of the paper."""
        return math.sqrt(-self.dimension * math.log(self.delta)) / (self.n * self.epsilon)

    @property
    def scale(self) -> float:
        """K = sqrt(R_F beta d log(1/delta)) / (n epsilon), a gradient norm."""
        return math.sqrt(self.loss_range * self.smoothness) * self.ratio

    @property
    def steps(self) -> int:
        """T = (n epsilon)^2 / (d log(1/delta)), rounded up."""
        return max(1, math.ceil(self.ratio**-2))

    def step_size(self, mixing: bool = True, printed: bool = True) -> float:
        """h of the proofs, sqrt(R_F/beta) * ratio * q/c, beta 101/12 times larger if mixed; without the q where the
        second moment is not bounded by (c/q)^2."""
        beta = self.smoothness * (101 / 12 if mixing else 1)
        return math.sqrt(self.loss_range / beta) * self.ratio / self.clip * (self.sample_rate if printed else 1.0)


def noise_constant(budget: Budget, noise_multiplier: float, steps: int) -> float:
    """v = z^2 epsilon^2 / (q^2 T log(1/delta)): the noise of a mechanism in the paper's unnamed unit."""
    return (noise_multiplier * budget.epsilon / budget.sample_rate) ** 2 / (-steps * math.log(budget.delta))


def clipped_printed(
    budget: Budget, *, v: float, mixing: bool = True, tau_squares: float = 0.0, first_gap: float = 0.0
) -> Bound:
    """Theorem 3.2 (mixing) or B.1 as printed. ``tau_squares`` is the sum of tau_k^2."""
    b = budget
    at_least_zero("v", v, "the noise constant")
    beta = b.smoothness * (101 / 12 if mixing else 1)
    main = (v / 2 + 2.5) * b.clip * math.sqrt(b.loss_range * beta) * b.ratio
    if not mixing:
        return Bound({"rate": main})
    log_term = -b.dimension * math.log(b.delta)
    front = b.clip * log_term * math.sqrt(101 / 12) * b.smoothness**1.5
    front /= b.sample_rate * b.n * b.epsilon * math.sqrt(b.loss_range)
    return Bound(
        {
            "rate": main,
            "first gap": 28 * b.clip * b.smoothness * b.ratio**2 * first_gap / (12 * b.sample_rate)
            + front * 21 * first_gap**2 / 24,
            "mixing": front * b.dimension * tau_squares / 12,
        }
    )


def threshold(kappa: float, scale: float) -> float:
    """The smallest clip that the proof of Theorem B.1 accepts, for K = ``scale``; see ``Budget.scale``.

    c >= 4 kappa log 10  and  c/(2 kappa) - log((c/4 + kappa)^2 / c) >= 0.4 - log K, which keeps the bias a2 of clipping
    below c*K. Scales with the loss, as a threshold for gradients must.
    """
    from scipy import optimize

    positive("kappa", kappa, "the tail constant")
    positive("K", scale, "the scale of the rate")
    least = 4 * kappa * math.log(10)

    def slack(c: float) -> float:
        return c / (2 * kappa) - math.log((c / 4 + kappa) ** 2 / c) - 0.4 + math.log(scale)

    if slack(least) >= 0:  # and it grows from here on: d/dc = 1/(2 kappa) - 2/(c + 4 kappa) + 1/c > 0
        return least
    most = 2 * least
    while slack(most) < 0:
        most *= 2
    found = float(optimize.brentq(slack, least, most, xtol=1e-12 * most))
    return found * (1 + 1e-9)


def threshold_printed(kappa: float, ratio: float, psi: float = 1.0) -> float:
    """max(4 kappa log 10, -psi kappa log(kappa) log(ratio)), as printed.

    It cannot be right for every problem: log(kappa) depends on the unit of the loss and is 0 at kappa = 1, where the
    threshold would not grow with n, while the bound it is to give falls with n (``tests/theory/test_utility.py`` has a
    counterexample).
    """
    positive("kappa", kappa, "the tail constant")
    return max(4 * kappa * math.log(10), -psi * kappa * math.log(kappa) * math.log(ratio))
