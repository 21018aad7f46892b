"""The corners of the promised range: a number, never NaN, never a warning, never silently small."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from depth import cases
from hypothesis import given, settings
from hypothesis import strategies as st

import modelmix as mm
from modelmix.accounting.guarantee import guarantee
from modelmix.accounting.pld import unmixed

CORNERS = list(itertools.product([0.05, 1000.0], [0.0, 1e-6, 1e6], [1, 10**7], [1e-6, 1.0], [1, 10**8]))


def check(mechanism: mm.Mechanism, steps: int) -> None:
    with np.errstate(all="raise", under="ignore"):
        result = mm.guarantee(mechanism, 1e-5, steps=steps)
        classic = mm.guarantee(mechanism, 1e-5, steps=steps, by="classic")
        delta = mm.delta(mechanism, 1.0, steps=steps)
    assert result.epsilon >= 0
    assert result.epsilon <= classic.epsilon * (1 + 1e-9)
    assert 0 <= delta <= 1
    assert math.isfinite(result.epsilon) or result.reason
    # Not silently small. By Hammersley, Chapman and Robbins A_2 - 1 >= s^2/variance for each coordinate, so the curve
    # at order 2 has a floor that uses none of the quadrature.
    variance = mechanism.coordinate_law.variance
    log_a2 = sum(count * math.log1p(shift**2 / variance) for shift, count in mechanism.worst_gradient)
    q = mechanism.sample_rate
    floor = math.log1p(q * q * math.expm1(log_a2)) if log_a2 < 600 else log_a2 + 2 * math.log(q)
    assert mm.rdp(mechanism, [2])[0] >= floor * (1 - 1e-9)


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
@pytest.mark.parametrize("corner", CORNERS, ids=str)
def test_corners(law, corner):
    z, omega, p, q, steps = corner
    check(mm.Mechanism(z, q, omega, p, law=law), steps)


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
@settings(max_examples=cases(25))
@given(
    z=st.floats(-1.3, 3).map(lambda e: 10**e),
    omega=st.floats(-6, 6).map(lambda e: 10**e),
    p=st.floats(0, 7).map(lambda e: int(10**e)),
    q=st.floats(-6, 0).map(lambda e: 10**e),
    steps=st.floats(0, 8).map(lambda e: int(10**e)),
)
def test_anywhere_inside(law, z, omega, p, q, steps):
    check(mm.Mechanism(z, q, omega, p, law=law), steps)


@pytest.mark.parametrize("corner", [c for c in CORNERS if c[1] == 0 and c[2] == 1], ids=str)
def test_comparison_lines_at_the_corners(corner):
    z, _, _, q, steps = corner
    ledger = mm.Ledger().add(mm.Mechanism(z, q), steps)
    line = guarantee(unmixed(ledger), 1e-5)
    assert 0 <= line.epsilon <= mm.epsilon(ledger, 1e-5)


def test_panels_without_a_sliver_of_rounding():
    check(mm.Mechanism(0.3, 1e-6, 0.1, 1, "laplace", 2), 10**4)


@pytest.mark.parametrize("field", ["noise_multiplier", "mixing_width"])
def test_lengths_that_would_overflow_are_refused(field):
    with pytest.raises(mm.ModelMixError, match="at most 1e\\+100"):
        mm.Mechanism(**{"noise_multiplier": 1.0, "sample_rate": 0.5, field: 1e200})


@pytest.mark.parametrize("z", [1e-5, 1e-100, 1e-200])
def test_almost_no_noise_is_a_huge_number_or_infinity_with_a_reason(z):
    result = mm.guarantee(mm.Mechanism(z, 0.01, 1.0), 1e-5, steps=10)
    assert result.epsilon > 1e9
    assert math.isfinite(result.epsilon) or "too small" in str(result.reason)
