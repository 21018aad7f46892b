"""The lines under every ModelMix epsilon: plain DP-SGD at the same noise, and a Gaussian of the same total variance.

Plain Gaussian DP-SGD is accounted by dp-accounting's privacy-loss distributions (rounded pessimistically, hence an
upper bound, but for the noise of the Fourier transforms, which is paid for in delta) and by the Renyi accountant; both
are proved, so the smaller counts. A privacy-loss distribution for a *mixed* mechanism is refused: the one-hot pair is
the worst for every Renyi order but not for the hockey-stick divergence, so a distribution built on it would
under-report.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from modelmix.accounting.accountant import epsilon as renyi_epsilon
from modelmix.accounting.calibration import calibrate, smallest_safe
from modelmix.accounting.ledger import Ledger
from modelmix.accounting.mechanism import Mechanism, equal_variance_gaussian
from modelmix.accounting.validation import probability
from modelmix.errors import UnprovedError

_RESOLUTION = 2e4  # buckets per epsilon; the pessimistic rounding costs a few parts in this many
_STEP_LOSS = 1e-3  # what all the steps' rounding may add to epsilon, as a fraction
_FINEST, _COARSEST = 1e-6, 0.5  # below the finest, probabilities are differences of rounding errors
_LOST_MASS, _MOST_MASS = 1e-2, 1.001  # the first as a fraction of delta
_MOST_BUCKETS = 4e4  # for the loss of one step
_STAGE = 10_000
_FFT_NOISE = 1e-11  # against the exact Gaussian, delta was never off by more than 2e-13


@dataclass(frozen=True)
class Line:
    """An epsilon and the accountant that proves it."""

    epsilon: float
    accountant: str


@lru_cache(maxsize=512)
def pld_epsilon(ledger: Ledger, delta: float) -> float:
    """epsilon of plain Gaussian DP-SGD by privacy-loss distributions; an upper bound.

    The bucket follows the size of epsilon, so that the cost does not.
    """
    delta = probability("delta", delta, "the failure probability") - _FFT_NOISE * (1 + len(ledger.phases))
    if delta <= 0:
        return math.inf
    ledger.require_proof()
    for phase in ledger.phases:
        if phase.mechanism.mixed or phase.mechanism.law != "gaussian" or type(phase.mechanism) is not Mechanism:
            raise UnprovedError(
                "the pair of datasets accounted for is the worst one",
                "a privacy-loss distribution is known to be sound for plain Gaussian DP-SGD only; for a mixed "
                "mechanism, spreading the gradient over coordinates can raise delta.",
                "Use the Renyi accountant (epsilon), which covers mixing, or best_epsilon, which looks at both.",
            )
    if not ledger.phases:
        return 0.0
    rough = renyi_epsilon(ledger, delta)
    if rough == 0:
        return 0.0
    while math.isfinite(rough):
        finer = _pld_at(ledger, delta, rough)
        # The Renyi value can be far off; a second look with a bucket that fits is then worth its price.
        if finer > 0.5 * rough or finer == 0:
            return finer
        rough = finer
    return math.inf


def _pld_at(ledger: Ledger, delta: float, rough: float) -> float:
    """One pass with buckets fit for an epsilon of about ``rough``; infinity where that would take too many."""
    spans = [_step_span(phase.mechanism) for phase in ledger.phases]
    # A bucket i costs about i^2/8 per step, and epsilon/i buckets are needed.
    interval = min(rough / _RESOLUTION, math.sqrt(8 * _STEP_LOSS * rough / ledger.steps))
    interval = min(max(interval, max(spans) / _MOST_BUCKETS), _COARSEST)
    if interval < _FINEST or max(rough, *spans) / interval > 50 * _MOST_BUCKETS:
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
            return float(total.get_epsilon_for_delta(delta))
    except (ArithmeticError, IndexError):  # the library broke down; the Renyi value stands
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


def best_epsilon(ledger: Ledger, delta: float) -> Line:
    """The smallest proved epsilon: by Renyi moments, or by privacy-loss distributions of the same noise without mixing.

    The second holds for a mixed mechanism as well, because mixing is post-processing of the plain one.
    """
    renyi = renyi_epsilon(ledger, delta)
    if all(phase.mechanism.law == "gaussian" for phase in ledger.phases):
        by_pld = pld_epsilon(unmixed(ledger), delta)
        if by_pld < renyi:
            return Line(by_pld, "PLD")
    return Line(renyi, "RDP")


def unmixed(ledger: Ledger) -> Ledger:
    """The same noise on the same clipped gradients, without mixing: plain DP-SGD where the noise is Gaussian."""

    def plain(mechanism: Mechanism) -> Mechanism:
        if mechanism.law == "gaussian":
            # Rotation invariance: only the l2 norm counts, however many coordinates carry it.
            return Mechanism(mechanism.noise_multiplier / mechanism.l2_sensitivity, mechanism.sample_rate)
        return replace(mechanism, mixing_width=0.0)

    return _mapped(ledger, plain)


def equal_variance(ledger: Ledger) -> Ledger:
    """Every phase replaced by plain Gaussian DP-SGD of the same total variance."""
    return _mapped(ledger, equal_variance_gaussian)


def _mapped(ledger: Ledger, change: Callable[[Mechanism], Mechanism]) -> Ledger:
    out = Ledger(unproved=ledger.unproved)
    for phase in ledger.phases:
        out = out.add(change(phase.mechanism), phase.steps)
    return out


def plain_noise_for(epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    """The noise multiplier with which plain Gaussian DP-SGD has the given epsilon, rounded up."""

    enough = calibrate(epsilon=epsilon, delta=delta, sample_rate=sample_rate, steps=steps, tolerance=0.01)

    def value(z: float) -> float:
        return best_epsilon(Ledger().add(Mechanism(z, sample_rate), steps), delta).epsilon

    return smallest_safe(value, float(epsilon), start=enough.noise_multiplier, tolerance=3e-4, name="z")


@dataclass(frozen=True)
class Comparison:
    """A mechanism beside its yardsticks: epsilon at equal noise, and the noise per coordinate at equal epsilon.

    Standard deviations are those of everything added to one coordinate, over the clip.
    """

    mechanism: Line
    plain: Line
    equal_variance: Line
    equal_variance_renyi: float
    total_std: float
    plain_std_at_equal_epsilon: float


def compare(mechanism: Mechanism, delta: float, *, steps: int) -> Comparison:
    """Everything the honest comparison needs, for one phase."""
    ledger = Ledger().add(mechanism, steps)
    twin = equal_variance(ledger)
    ours = best_epsilon(ledger, delta)
    needed = math.nan
    if 0 < ours.epsilon < math.inf:
        z = plain_noise_for(ours.epsilon, delta, mechanism.sample_rate, steps)
        needed = z * mechanism.l2_sensitivity
    return Comparison(
        mechanism=ours,
        plain=best_epsilon(unmixed(ledger), delta),
        equal_variance=best_epsilon(twin, delta),
        equal_variance_renyi=renyi_epsilon(twin, delta),
        total_std=mechanism.total_std,
        plain_std_at_equal_epsilon=needed,
    )
