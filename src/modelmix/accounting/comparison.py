"""The lines under every ModelMix epsilon: plain DP-SGD at the same noise, and a Gaussian of the same total variance."""

from __future__ import annotations

import math
from dataclasses import dataclass

from modelmix.accounting.accountant import epsilon as renyi_epsilon
from modelmix.accounting.calibration import calibrate
from modelmix.accounting.guarantee import Guarantee, as_ledger, guarantee
from modelmix.accounting.ledger import Ledger
from modelmix.accounting.mechanism import Mechanism
from modelmix.accounting.pld import equal_variance, unmixed
from modelmix.errors import ModelMixError


def plain_noise_for(epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    """The noise multiplier with which plain Gaussian DP-SGD has the given epsilon, rounded up."""
    found = calibrate(epsilon=epsilon, delta=delta, sample_rate=sample_rate, steps=steps, tolerance=3e-4)
    return found.noise_multiplier


@dataclass(frozen=True)
class Comparison:
    """A mechanism beside its yardsticks: epsilon at equal noise, and the noise per coordinate at equal epsilon.

    Standard deviations are those of everything added to one coordinate, over the clip.
    """

    mechanism: Guarantee
    plain: Guarantee
    equal_variance: Guarantee
    equal_variance_renyi: float
    total_std: float
    plain_std_at_equal_epsilon: float


def compare(source: Mechanism | Ledger, delta: float, *, steps: int | None = None) -> Comparison:
    """Return everything the honest comparison needs, for a mechanism and its steps or a ledger of one phase.

    Raises:
        UnprovedError: for a ledger that broke a rule.
    """
    ledger = as_ledger(source, steps)
    if len(ledger.phases) != 1:
        raise ModelMixError("compare takes one phase: give a mechanism and its steps, or a ledger of one phase.")
    (phase,) = ledger.phases
    mechanism = phase.mechanism
    twin = equal_variance(ledger)
    ours = guarantee(ledger, delta)
    needed = math.nan
    if 0 < ours.epsilon < math.inf:
        z = plain_noise_for(ours.epsilon, delta, mechanism.sample_rate, phase.steps)
        needed = z * mechanism.l2_sensitivity
    return Comparison(
        mechanism=ours,
        plain=guarantee(unmixed(ledger), delta),
        equal_variance=guarantee(twin, delta),
        equal_variance_renyi=renyi_epsilon(twin, delta),
        total_std=mechanism.total_std,
        plain_std_at_equal_epsilon=needed,
    )
