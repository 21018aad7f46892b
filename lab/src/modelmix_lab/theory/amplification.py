r"""Theorem 4.2 with its constants: mean and variance of the pointwise loss, and what Bernstein makes of them.

The loss of one coordinate at o is u(o) = log f(o - s) - log f(o), o drawn from f(. - s). Units: the clip is 1, so in
the paper's letters c = 1, sigma or 1/lambda = z, tau_bar = omega. Both directions have the same law, by
symmetry.

Composition. Given the past, the loss of a step is a sum over coordinates of independent losses, so means add and
**variances add**. If mean(s)/s^norm and variance(s)/s^norm are largest at the largest shift, the sums are at most those
of one coordinate of size 1: the worst direction for this argument (``require_worst_direction`` checks it). A loss never
above b, with mean at most m and variance at most v given the past, obeys Freedman's inequality:

    Pr( sum of T losses > T m + b l/3 + sqrt(b^2 l^2/9 + 2 T v l) ) <= delta,        l = log(1/delta).

Only Laplace noise has a bounded loss, and only without sampling do coordinates stay independent; anything else raises
``UnprovedError``. The Renyi accountant covers it all and is nearly always better; this module is here to show why the
paper's law holds, where it sets in, and what its failure probability is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from modelmix._checks import positive, probability, whole
from modelmix.accounting.laws import Gaussian, Laplace, Law, Mixed, known
from modelmix.accounting.mechanism import Mechanism
from modelmix.accounting.quadrature import panel_rule
from modelmix.errors import ModelMixError, UnprovedError
from modelmix.theory.loss import LossMoments, loss_moments

Array = NDArray[np.float64]
_GRID = 24
_SLACK = 1e-9


def laplace_lemma(z: float, omega: float) -> LossMoments:
    """The paper's lemma for Laplace noise (Appendix D.2): bounds on mean and variance, in units of the clip.

    Its condition is tau_bar > max(2 log(tau_bar)/lambda + c, 1); the variance is printed with s for c.
    """
    positive("z", z, "the noise multiplier")
    rate, loss = 1 / z, 1 / z
    if not omega > max(2 * math.log(max(omega, 1.0)) / rate + 1, 1.0):
        raise ModelMixError(
            f"omega = {omega:g} is too small for the lemma: it asks for omega > max(2 z log(omega) + 1, 1)."
        )
    outside = -math.expm1(-rate * omega) / (omega * rate)
    edge = outside + (2 * math.log(omega) / rate + 1) / omega
    middle = math.expm1(loss) / (2 * (omega - 1))
    mean = loss * math.expm1(loss) * edge + middle * math.expm1(loss / (2 * (omega - 1))) * (1 - outside)
    return LossMoments(mean, loss**2 * edge + middle**2 * (1 - outside))


@dataclass(frozen=True)
class GaussianLemma:
    """The event the Gaussian half of Theorem 4.2 gives up on: a loss above ``loss`` in one step.

    ``chance`` is the bound on its probability as printed; ``exact`` the probability itself, by quadrature.
    """

    loss: float
    chance: float
    exact: float


def gaussian_lemma(z: float, omega: float) -> GaussianLemma:
    """epsilon_0 = 1/(tau_bar sqrt(2 log tau_bar)) and delta_0 = (2c + 2 sigma sqrt(2 log(tau_bar max(c, 1))))/tau_bar.

    T * delta_0 is part of the theorem's delta: see ``gaussian_width_needed``.
    """
    positive("z", z, "the noise multiplier")
    if not omega > max(2 * z * math.log(max(omega, 1.0)) + 2, math.exp(min(700.0, 3 / z)), 2):
        raise ModelMixError(
            f"omega = {omega:g} is too small for the lemma: it asks for omega > max(2 z log(omega) + 2, exp(3/z), 2)."
        )
    loss = 1 / (omega * math.sqrt(2 * math.log(omega)))
    law = _mixed(Gaussian(z), omega)
    exact = 0.0
    for piece in panel_rule(law, 1.0, 1.0, 3).pieces:
        log_f, log_shifted = law.log_density(piece.x, piece.origin), law.log_density(piece.x - 1, piece.origin)
        exact += float(np.sum((piece.weight * np.exp(log_shifted))[log_shifted - log_f >= loss]))
    return GaussianLemma(loss, (2 + 2 * z * math.sqrt(2 * math.log(omega))) / omega, exact)


def gaussian_width_needed(z: float, steps: int, delta: float) -> float:
    """The width at which T * delta_0 of the Gaussian theorem falls to delta: below it the theorem says nothing."""
    whole("steps", steps, "the number of steps", least=1)
    probability("delta", delta, "the failure probability")
    omega = math.e
    for _ in range(200):  # omega = T (2 + 2 z sqrt(2 log omega)) / delta, a contraction
        omega = steps * (2 + 2 * z * math.sqrt(2 * math.log(max(omega, math.e)))) / delta
    return omega


def _mixed(base: Law, omega: float) -> Law:
    return Mixed(base, omega) if omega > 0 else base


@lru_cache(maxsize=256)
def require_worst_direction(law: Law, bound: float) -> None:
    """Raises ``UnprovedError`` unless mean(s)/s^norm and variance(s)/s^norm are largest at s = ``bound``, on a grid."""
    end = loss_moments(law, bound)
    for s in bound * np.linspace(0, 1, _GRID + 1)[1:-1]:
        here, share = loss_moments(law, float(s)), float(s / bound) ** law.norm
        if here.mean > share * end.mean * (1 + _SLACK) or here.variance > share * end.variance * (1 + _SLACK):
            raise UnprovedError(
                "one coordinate of size c has the largest mean and variance of the loss",
                f"for {law} spreading the gradient over coordinates of size {s:.3g} raises them.",
                "Use the Renyi accountant (epsilon).",
            )


@dataclass(frozen=True)
class Bernstein:
    """An epsilon of Theorem 4.2 for Laplace noise, term by term; it fails with probability ``delta``."""

    drift: float
    spread: float
    tail: float
    delta: float

    @property
    def epsilon(self) -> float:
        return self.drift + self.spread + self.tail


def bernstein(mechanism: Mechanism, delta: float, steps: int, *, lemma: bool = False) -> Bernstein:
    """epsilon = T m + sqrt(b^2 l^2/9 + 2 T v l) + b l/3 for mixed Laplace noise without sampling; b = 1/z.

    Args:
        lemma: take the paper's bounds on mean and variance in place of quadrature (p = 1).
    """
    delta = probability("delta", delta, "the failure probability")
    steps = whole("steps", steps, "the number of steps", least=1)
    law = mechanism.coordinate_law
    noise = known(law)
    if not isinstance(noise, Laplace):
        raise UnprovedError(
            "the loss of one step is bounded",
            f"{law} has no largest loss; the Gaussian half of Theorem 4.2 gives up a probability of about "
            "(2 + 2 z sqrt(2 log omega))/omega in every step, and its reduction to one coordinate is not proved.",
            "Use Laplace noise, or the Renyi accountant (epsilon).",
        )
    if mechanism.sample_rate != 1:
        raise UnprovedError(
            "coordinates are independent given the past",
            "sampling a batch makes them dependent, and the worst direction is then not proved for mean and variance.",
            "Use q = 1, or the Renyi accountant (epsilon).",
        )
    bound = mechanism.coordinate_bound
    if lemma:
        if mechanism.p != 1:
            raise ModelMixError("the paper's lemma is for one coordinate of size c: p must be 1.")
        found = laplace_lemma(mechanism.noise_multiplier, mechanism.mixing_width)
    else:
        require_worst_direction(law, bound)
        one = loss_moments(law, bound)
        # |v|_1 <= 1 with |v_j| <= bound: at most 1/bound times what one coordinate of that size has.
        found = LossMoments(one.mean / bound, one.variance / bound)
    most = 1 / mechanism.noise_multiplier
    ell = -math.log(delta)
    up = 1 + 1e-12
    return Bernstein(
        drift=steps * found.mean * up,
        spread=math.sqrt((most * ell / 3) ** 2 + 2 * steps * found.variance * ell) * up,
        tail=most * ell / 3 * up,
        delta=delta,
    )


def advanced_composition(loss: float, delta: float, steps: int) -> float:
    """Theorem 2.1: sqrt(2 T log(1/delta)) epsilon_0 + T epsilon_0 (exp(epsilon_0) - 1), mixing or not."""
    return math.sqrt(-2 * steps * math.log(delta)) * loss + steps * loss * math.expm1(loss)


def law_window(mechanism: Mechanism, delta: float, steps: int) -> tuple[float, float]:
    """Between which widths epsilon falls like 1/sqrt(omega), for Laplace noise without sampling.

    With variance C/omega and mean about half of it, the drift TC/(2 omega) is below the spread sqrt(2TCl/omega) from
    omega = TC/(8l) on, and the spread is above the tail b l/3 up to omega = 18 TC/(b^2 l). Before, epsilon falls like
    1/omega; after, it levels off. The window is 144 z^2 wide.
    """
    ell = -math.log(probability("delta", delta, "the failure probability"))
    z = mechanism.noise_multiplier
    wide = 1e4 * (1 + z)
    constant = wide * loss_moments(_mixed(Laplace(z), wide)).variance
    return steps * constant / (8 * ell), 18 * steps * constant * z * z / ell
