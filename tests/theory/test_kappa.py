"""The tail constant of Assumption 2.1: what it promises, and what the estimator sees."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import modelmix as mm
from modelmix.theory.kappa import START, fit_tail, tail_constant


def tail_holds(noise: np.ndarray, kappa: float) -> bool:
    """Pr(|xi| >= t) <= exp(-t/kappa) for every t >= kappa log 10, checked at every value: an independent statement."""
    for t in np.unique(noise):
        if t >= kappa * START * (1 + 1e-12) and np.mean(noise >= t) > math.exp(-t / kappa) * (1 + 1e-9):
            return False
    # Just above kappa log 10 the tail must be at most a tenth already.
    return bool(np.mean(noise > kappa * START * (1 + 1e-9)) <= 0.1 + 1e-12)


@given(values=st.lists(st.floats(0, 1e3), min_size=1, max_size=60).filter(lambda v: max(v) > 1e-3))
def test_it_is_the_smallest_constant_that_holds(values):
    noise = np.array(values)
    kappa = tail_constant(noise)
    assert tail_holds(noise, kappa * (1 + 1e-9))
    assert not tail_holds(noise, kappa * 0.999)


@given(values=st.lists(st.floats(0.1, 100), min_size=2, max_size=20), times=st.integers(2, 5))
def test_weights_are_repetitions(values, times):
    repeated = np.repeat(values, times)
    assert tail_constant(repeated) == pytest.approx(tail_constant(values, weights=np.full(len(values), 3.0)))
    assert tail_constant([1.0, 1e9], weights=[1.0, 0.0]) == tail_constant([1.0])


def test_an_exponential_tail_is_recognised_and_others_are_not():
    """Quantiles, not draws. The constant of exponential noise comes out; two other tails are rejected."""
    n = 5000
    ranks = (np.arange(n) + 0.5) / n
    exponential = fit_tail(-2.0 * np.log1p(-ranks))
    assert exponential.mean_excess == pytest.approx(2.0, rel=0.01)
    assert exponential.kappa == pytest.approx(2.0, rel=0.1)
    assert exponential.chance > 0.5
    heavy = fit_tail((1 - ranks) ** -0.7)
    bounded = fit_tail(ranks)
    assert heavy.chance < 0.01
    assert bounded.chance < 0.01
    assert heavy.kappa > 3 * heavy.start / START  # what is far out decides


def test_false_alarms_are_as_rare_as_they_should_be():
    """Of 100 exponential samples about five have a chance below 0.05; more than 15 is one case in 30,000."""
    rng = np.random.default_rng(0)
    low = sum(fit_tail(rng.exponential(size=400), draws=100).chance < 0.05 for _ in range(100))
    assert low <= 15


@pytest.mark.parametrize("bad", [[], [-1.0, 2.0], [math.nan, 1.0], [math.inf]])
def test_nonsense_is_refused(bad):
    with pytest.raises(mm.ModelMixError):
        tail_constant(bad)
    with pytest.raises(mm.ModelMixError):
        fit_tail(np.ones(100))
