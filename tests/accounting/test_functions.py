"""Elementary functions against 60 digits."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelmix.accounting.functions import log_bracket, log_exp_minus_line, log_expm1


@settings(max_examples=200)
@given(k=st.integers(2, 5000), u=st.floats(-60, 60))
def test_bracket(k, u):
    """log(e^{ku} - 1 - k(e^u - 1)) for all sizes of u, against 60 digits."""
    with mp.workdps(60 if abs(u) > 1e-30 else 700):
        truth = mp.expm1(mp.mpf(k) * mp.mpf(u)) - k * mp.expm1(mp.mpf(u))
        log_truth = float(mp.log(truth)) if truth > 0 else -math.inf
    ours = log_bracket(np.array([[float(k)]]), np.array([u]))[0, 0]
    if log_truth < -1400:  # squares below the smallest double
        assert ours < -1300
    else:
        assert ours == pytest.approx(log_truth, rel=1e-14, abs=2e-13)


@settings(max_examples=200)
@given(k=st.integers(2, 5000), u=st.floats(-50, 50).filter(lambda v: abs(v) > 1e-6))
def test_rounding_bound_of_the_bracket(k, u):
    """Its logarithmic derivative is at most 2/|u| + k, which is what the added rounding error assumes."""
    with mp.workdps(60):
        ku = mp.mpf(k) * mp.mpf(u)
        slope = k * abs(mp.exp(ku) - mp.exp(u)) / (mp.expm1(ku) - k * mp.expm1(mp.mpf(u)))
        assert slope <= (2 / abs(mp.mpf(u)) + k) * (1 + mp.mpf(10) ** -40)


@settings(max_examples=200)
@given(x=st.floats(-700, 700).filter(lambda v: abs(v) > 1e-150))
def test_exponential_minus_its_tangent(x):
    with mp.workdps(400):
        truth = float(mp.log(mp.expm1(mp.mpf(x)) - mp.mpf(x)))
    assert log_exp_minus_line(np.array([x]))[0] == pytest.approx(truth, rel=1e-14, abs=1e-13)


@given(x=st.floats(1e-300, 1e6))
def test_log_expm1(x):
    with mp.workdps(400):
        truth = float(mp.log(mp.expm1(mp.mpf(x))))
    assert log_expm1(np.array([x]))[0] == pytest.approx(truth, rel=1e-14, abs=1e-14)
