"""Clipped descent on any smooth loss: Theorem B.1 (DP-SGD), Theorem 3.2 (ModelMix), and the clip they ask for.

``clipped_printed`` and ``threshold_printed`` are the paper's formulas; the others hold. Theorems B.1 and 3.2 drop a
factor 1/q that their proofs carry, 3.2 counts R_F where its proof has 3/2 R_F, and the printed threshold of the clip is
false (``docs/theory.md`` has more). Units as in ``utility``: averaged gradients, step size h.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from modelmix._checks import at_least_zero, positive, probability, rate, whole
from modelmix.errors import ModelMixError
from modelmix.theory.utility import Bound, Setting


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
