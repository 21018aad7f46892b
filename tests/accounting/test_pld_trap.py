"""Why there is no privacy-loss distribution for a mixed mechanism."""

from __future__ import annotations

import math

import numpy as np
import pytest

import modelmix as mm
from modelmix.accounting.guarantee import guarantee
from modelmix.accounting.moments import log_moments
from modelmix.accounting.pld import pld_epsilon

LAW = mm.Mixed(mm.Gaussian(1.0), 10.0)
SHIFT = 2.0


def hockey_stick_at_zero(coordinates: int) -> float:
    """delta(epsilon = 0) when the same l2 budget is spread over one or two coordinates, on a fine lattice."""
    h = 0.01
    x = np.arange(-12, 14, h)
    s = SHIFT / math.sqrt(coordinates)
    here, there = (np.exp(LAW.log_density(x - shift)) * h for shift in (0.0, s))
    if coordinates == 2:
        here, there = np.outer(here, here), np.outer(there, there)
    return float(np.sum(np.maximum(there - here, 0.0)))


def test_spreading_raises_delta_although_it_lowers_every_moment():
    one, two = hockey_stick_at_zero(1), hockey_stick_at_zero(2)
    assert two / one == pytest.approx(1.23, abs=0.01)
    k = np.arange(2.0, 33.0)
    assert np.all(2 * log_moments(LAW, SHIFT / math.sqrt(2), k) < log_moments(LAW, SHIFT, k))


@pytest.mark.parametrize("mechanism", [mm.Mechanism(1.0, 0.1, 2.0), mm.Mechanism(1.0, 0.1, law="laplace")])
def test_it_is_refused(mechanism):
    ledger = mm.Ledger().add(mm.Mechanism(1.0, 0.1), 5).add(mechanism, 5)
    with pytest.raises(mm.UnprovedError, match="privacy-loss distribution"):
        pld_epsilon(ledger, 1e-5)


def test_what_stands_in_for_it_ignores_the_mixing():
    """The PLD value printed for a mixed ledger is that of the noise alone; mixing never lowers it."""
    narrow, wide = (mm.Ledger().add(mm.Mechanism(0.3, 0.5, omega), 5) for omega in (0.01, 0.1))
    assert guarantee(narrow, 1e-5) == guarantee(wide, 1e-5)
