"""Privacy-loss distributions of plain Gaussian DP-SGD, rounded up; refused for mixed mechanisms.

dp-accounting's distributions are rounded pessimistically, hence upper bounds, but for the noise of the Fourier
transforms, which is paid for in delta. A privacy-loss distribution for a *mixed* mechanism is refused: the one-hot pair
is the worst for every Renyi order but not for the hockey-stick divergence, so a distribution built on it would
under-report. The same noise *without* mixing is a sound bound for a mixed mechanism, because mixing is post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.special import log_ndtr, ndtr

from modelmix._checks import at_least_zero, probability
from modelmix.accounting import accountant
from modelmix.accounting.ledger import Ledger, Phase
from modelmix.accounting.mechanism import Mechanism, equal_variance_gaussian
from modelmix.errors import ModelMixError, UnprovedError

ROUGH = 2e3  # buckets per epsilon where many numbers are wanted at once: about 4 parts in 10^4 above the finer value
_RESOLUTION = 2e4  # buckets per epsilon; the pessimistic rounding costs a few parts in this many
_STEP_LOSS = 1e-3  # what all the steps' rounding may add to epsilon, as a fraction
_FINEST, _COARSEST = 1e-6, 0.5  # below the finest, probabilities are differences of rounding errors
_LOST_MASS, _MOST_MASS = 1e-2, 1.001  # the first as a fraction of delta
_MOST_BUCKETS = 4e4  # for the loss of one step
_STAGE = 10_000
_LARGE = 600.0  # exp of more overflows
_FFT_NOISE = 1e-11  # against the exact Gaussian, delta was never off by more than 2e-13


def renyi_epsilon(ledger: Ledger, delta: float) -> float:
    """About the answer, by whole orders, from which the size of a bucket is taken."""
    return accountant.epsilon(ledger, delta, real_orders=False)


def pld_epsilon(ledger: Ledger, delta: float, resolution: float = _RESOLUTION) -> float:
    """epsilon of plain Gaussian DP-SGD by privacy-loss distributions; an upper bound.

    The bucket follows the size of epsilon, so that the cost does not. Fewer buckets per epsilon (``resolution``) are
    faster and round up further.
    """
    return _cached_epsilon(_checked(ledger), delta, resolution)


@lru_cache(maxsize=512)
def _cached_epsilon(ledger: Ledger, delta: float, resolution: float) -> float:
    delta = probability("delta", delta, "the failure probability") - _FFT_NOISE * (1 + len(ledger.phases))
    if delta <= 0:
        return math.inf
    if not ledger.phases:
        return 0.0
    rough = renyi_epsilon(ledger, delta)
    if rough == 0:
        return 0.0
    while math.isfinite(rough):
        finer = _asked(ledger, rough, delta, lambda total: float(total.get_epsilon_for_delta(delta)), 0.0, resolution)
        # The Renyi value can be far off; a second look with a bucket that fits is then worth its price.
        if finer > 0.5 * rough or finer == 0:
            return finer
        rough = finer
    return math.inf


@lru_cache(maxsize=512)
def pld_delta(ledger: Ledger, epsilon: float) -> float:
    """delta of plain Gaussian DP-SGD at ``epsilon``; an upper bound, infinity where none is found."""
    ledger, epsilon = _checked(ledger), at_least_zero("epsilon", epsilon, "the privacy loss")
    if not ledger.phases:
        return 0.0
    noise = _FFT_NOISE * (1 + len(ledger.phases))
    spread = renyi_epsilon(ledger, 1e-3)
    if not math.isfinite(spread):
        return math.inf
    rough = epsilon or spread or 1.0
    found = _asked(ledger, rough, noise, lambda total: float(total.get_delta_for_epsilon(epsilon)), spread)
    return found + 2 * noise  # the second for the mass that may be missing


def one_step_delta(mechanism: Mechanism, epsilon: float) -> float:
    """The exact delta of one step of plain Gaussian DP-SGD, removing: a lower bound on that of any number of steps.

    q * delta_G(log(1 + (exp(epsilon) - 1)/q)), with delta_G of the Gaussian pair N(0, z^2), N(1, z^2).
    """
    z, q = mechanism.noise_multiplier, mechanism.sample_rate
    inner = epsilon - math.log(q) if epsilon > _LARGE else math.log1p(math.expm1(epsilon) / q)
    above = float(ndtr(0.5 / z - inner * z))
    return q * (above - math.exp(min(inner + float(log_ndtr(-0.5 / z - inner * z)), 0.0)))


def pld_group_epsilon(ledger: Ledger, delta: float) -> float:
    """The least e with (1 + exp(e)) delta(e) <= ``delta``, an upper bound; infinity where none is found."""
    ledger = _checked(ledger)
    noise = 3 * _FFT_NOISE * (1 + len(ledger.phases))
    rough = renyi_epsilon(ledger, delta / 10)
    if not ledger.phases or not 0 < rough < math.inf:
        return rough

    def question(total: Any) -> float:
        low, high = 0.0, 4 * rough
        if not (1 + math.exp(high)) * (total.get_delta_for_epsilon(high) + noise) <= delta:
            return math.inf
        while high - low > 1e-4 * high:
            middle = (low + high) / 2
            if (1 + math.exp(middle)) * (total.get_delta_for_epsilon(middle) + noise) <= delta:
                high = middle
            else:
                low = middle
        return high

    return _asked(ledger, rough, noise, question) if rough < 100 else math.inf


def _checked(ledger: Ledger) -> Ledger:
    """Refuse what a distribution is not sound for, and return the phases alone.

    Equal mechanisms are put together, for their order does not matter, and nothing is said of neighbours: the number is
    the same for all claims, and cached for all of them.
    """
    ledger.require_proof()
    counts: dict[Mechanism, int] = {}
    for phase in ledger.phases:
        if phase.mechanism.mixed or phase.mechanism.law != "gaussian" or type(phase.mechanism) is not Mechanism:
            raise UnprovedError(
                "the pair of datasets accounted for is the worst one",
                "this privacy-loss distribution is known to be sound for plain Gaussian DP-SGD only; "
                "for mixed Gaussian noise, spreading the gradient over coordinates can raise delta.",
                'Use guarantee(), which takes the best proved accountant, or by="cone" or "renyi", which cover mixing.',
            )
        counts[phase.mechanism] = counts.get(phase.mechanism, 0) + phase.steps
    return Ledger(tuple(Phase(mechanism, steps) for mechanism, steps in counts.items()))


def _asked(
    ledger: Ledger,
    rough: float,
    delta: float,
    question: Callable[[Any], float],
    spread: float = 0.0,
    resolution: float = _RESOLUTION,
) -> float:
    """Ask the composed distribution, with buckets fit for an epsilon of about ``rough``; infinity if it breaks down.

    ``spread`` is about how far the composed losses reach, where that is more than ``rough``: it must fit into memory.
    """
    spans = [_step_span(phase.mechanism) for phase in ledger.phases]
    # A bucket i costs about i^2/8 per step, and epsilon/i buckets are needed.
    interval = min(rough / resolution, math.sqrt(8 * _STEP_LOSS * rough / ledger.steps))
    interval = min(max(interval, max(spans) / _MOST_BUCKETS, spread / (10 * _MOST_BUCKETS)), _COARSEST)
    if interval < _FINEST or max(rough, spread, *spans) / interval > 50 * _MOST_BUCKETS:
        return math.inf

    try:
        from dp_accounting.pld import privacy_loss_distribution as pld  # heavy: over half a second
    except ModuleNotFoundError:  # a bare training machine; the Renyi value stands, and says that it is one
        return math.inf

    total = None
    try:
        with np.errstate(over="raise", invalid="raise", divide="raise"):
            for phase in ledger.phases:
                one = pld.from_gaussian_mechanism(
                    phase.mechanism.noise_multiplier,
                    sampling_prob=phase.mechanism.sample_rate,
                    value_discretization_interval=interval,
                )
                many = _composed(one, phase.steps)
                total = many if total is None else total.compose(many)
            assert total is not None
            # All the mass must still be there. A little too much only raises delta; much too much is a breakdown.
            mass = total.get_delta_for_epsilon(-100 - 10 * rough)
            if not 1 - _LOST_MASS * delta <= mass <= _MOST_MASS:
                return math.inf
            return question(total)
    except ModelMixError:  # a ValueError as well, and none of the library's
        raise
    except (ArithmeticError, IndexError, ValueError):  # the library broke down; the Renyi value stands
        return math.inf


def _step_span(mechanism: Mechanism) -> float:
    """About the largest loss of one step, ten standard deviations out."""
    z = mechanism.noise_multiplier
    loss = (0.5 / z + 10) / z + math.log(mechanism.sample_rate)
    return loss if loss > 30 else math.log1p(math.exp(loss))


def _composed(one: Any, steps: int) -> Any:
    """``steps`` copies of a distribution; in stages, because the library's cost grows with the count of one stage."""
    if steps <= _STAGE:
        return one.self_compose(steps)
    stages, rest = divmod(steps, _STAGE)
    many = _composed(one.self_compose(_STAGE), stages)
    return many.compose(one.self_compose(rest)) if rest else many


def unmixed(ledger: Ledger) -> Ledger:
    """The same noise on the same clipped gradients, without mixing: plain DP-SGD where the noise is Gaussian."""

    def plain(mechanism: Mechanism) -> Mechanism:
        if mechanism.law == "gaussian":
            # Rotation invariance: only the l2 norm counts, however many coordinates carry it.
            return Mechanism(mechanism.noise_multiplier / mechanism.l2_sensitivity, mechanism.sample_rate)
        return replace(mechanism, mixing_width=0.0)

    return _mapped(ledger, plain)


def halved(ledger: Ledger) -> Ledger | None:
    """Every phase at half the noise, half the mixing width and q = 1: it bounds replacing a unit by another.

    The contributions of the two units are v and v', and v - v' lies in twice the clipped set, which is convex and
    symmetric. In units of twice the clip the noise and the width are half of what they were. Sampling: the coins that
    decide in which steps the unit is drawn have one law in both datasets, so publishing them as well raises no
    divergence, by post-processing. Given them, steps without the unit are the same in both and the others are those of
    q = 1; all steps at q = 1 are never better. None where the law is one of the user's own, which need not scale.
    """
    if not all(isinstance(phase.mechanism.law, str) for phase in ledger.phases):
        return None
    return _mapped(
        ledger,
        lambda m: replace(m, noise_multiplier=m.noise_multiplier / 2, mixing_width=m.mixing_width / 2, sample_rate=1.0),
    )


def equal_variance(ledger: Ledger) -> Ledger:
    """Every phase replaced by plain Gaussian DP-SGD of the same total variance."""
    return _mapped(ledger, equal_variance_gaussian)


def _mapped(ledger: Ledger, change: Callable[[Mechanism], Mechanism]) -> Ledger:
    out = replace(ledger, phases=())
    for phase in ledger.phases:
        out = out.add(change(phase.mechanism), phase.steps)
    return out
