"""The estimators themselves: never above the truth more often than stated, and tight where the truth is known."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy import optimize, stats

import modelmix as mm
from modelmix.auditing.bounds import clopper_pearson_upper, epsilon_lower_bound, one_run_lower_bound, one_run_p_value


def gaussian_delta(epsilon: float, mu: float) -> float:
    """The exact trade-off of a Gaussian shifted by mu standard deviations (Balle and Wang 2018)."""
    return stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)


def gaussian_epsilon(delta: float, mu: float) -> float:
    return optimize.brentq(lambda e: gaussian_delta(e, mu) - delta, 0, 100)


@pytest.mark.parametrize(("hits", "trials"), [(0, 10), (3, 10), (10, 10), (0, 100_000), (37, 100_000)])
@pytest.mark.parametrize("level", [0.025, 1e-3])
def test_clopper_pearson_inverts_the_binomial(hits, trials, level):
    upper = float(clopper_pearson_upper(hits, trials, level))
    assert hits / trials <= upper <= 1
    if hits < trials:
        assert stats.binom.cdf(hits, trials, upper) == pytest.approx(level, rel=1e-6)
    else:
        assert upper == 1


@pytest.mark.parametrize("mu", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("delta", [0.0, 1e-3, 1e-2])
def test_never_above_the_truth_more_often_than_stated(mu, delta):
    """300 audits at 90 % confidence of a mechanism with a known epsilon; more than 55 misses come up once in 10^5.

    At delta = 0 the true epsilon is infinite, so that only delta > 0 can fail; there the mean shows that it is no hope.
    """
    rng = np.random.default_rng(1)
    truth = gaussian_epsilon(delta, mu) if delta else math.inf
    found = np.array(
        [epsilon_lower_bound(rng.normal(size=2000), rng.normal(mu, size=2000), delta, 0.9).epsilon for _ in range(300)]
    )
    assert np.sum(found > truth) <= 55
    assert np.mean(found) > 0.25 * min(truth, 3.0) * min(1.0, mu)


@pytest.mark.parametrize(("mu", "delta"), [(1.0, 1e-2), (2.0, 1e-2), (1.0, 1e-3)])
def test_tight_with_many_trials(mu, delta):
    rng = np.random.default_rng(2)
    truth = gaussian_epsilon(delta, mu)
    found = epsilon_lower_bound(rng.normal(size=2_000_000), rng.normal(mu, size=2_000_000), delta).epsilon
    assert 0.85 * truth < found < truth


def test_worlds_that_are_the_same_give_nothing():
    rng = np.random.default_rng(3)
    found = [epsilon_lower_bound(rng.normal(size=5000), rng.normal(size=5000), 0.0).epsilon for _ in range(100)]
    assert np.sum(np.array(found) > 0) <= 15  # 5 expected at most; once in 10^4
    constant = np.zeros(1000)
    assert epsilon_lower_bound(constant, constant, 1e-5).epsilon == 0


def test_the_threshold_is_chosen_on_one_half_and_judged_on_the_other():
    """The halves ask for different thresholds: what the first one would have found must not count, nor the second."""
    half = 5000
    zero, one, two = np.zeros(half), np.ones(half), np.full(half, 2.0)
    apart = epsilon_lower_bound(np.concatenate([zero, zero]), np.concatenate([two, two]), 0.0).epsilon
    assert apart > 6
    # The first half says 2; in the second nobody reaches that, although 1 would tell its worlds apart.
    found = epsilon_lower_bound(np.concatenate([zero, zero]), np.concatenate([two, one]), 0.0)
    assert found.epsilon < 1e-3
    assert (found.false_positives, found.false_negatives) == (0.0, 1.0)
    # Nothing but the first half is told apart.
    found = epsilon_lower_bound(np.concatenate([zero, two]), np.concatenate([two, two]), 0.0)
    assert found.epsilon < 1e-3
    assert (found.false_positives, found.false_negatives) == (1.0, 0.0)


@pytest.mark.parametrize("trials", [30, 200])
def test_choosing_among_many_thresholds_costs_no_confidence(trials):
    """1,000 audits of worlds that are the same, at 80 % confidence: more than 250 alarms come up once in 10^4.

    Of few trials the best of all thresholds looks good by chance: judged on the half that chose it, it would alarm in
    far more audits than stated.
    """
    rng = np.random.default_rng(6)
    found = [
        epsilon_lower_bound(rng.normal(size=trials), rng.normal(size=trials), 0.0, 0.8).epsilon for _ in range(1000)
    ]
    assert np.sum(np.array(found) > 0) <= 250


def test_worlds_without_overlap_give_what_the_trials_allow():
    found = epsilon_lower_bound(np.zeros(20_000), np.ones(20_000), 1e-5).epsilon
    level = 0.025
    rate = 1 - level ** (1 / 10_000)
    assert found == pytest.approx(math.log((1 - rate - 1e-5) / rate), rel=1e-6)


def test_more_confidence_and_more_delta_say_less():
    rng = np.random.default_rng(4)
    out, into = rng.normal(size=20_000), rng.normal(1.5, size=20_000)
    by_confidence = [epsilon_lower_bound(out, into, 1e-5, c).epsilon for c in (0.5, 0.9, 0.99, 0.9999)]
    by_delta = [epsilon_lower_bound(out, into, d).epsilon for d in (0.0, 1e-3, 1e-2, 0.1)]
    assert by_confidence == sorted(by_confidence, reverse=True)
    assert all(a > b - 0.05 for a, b in pairwise(by_delta))  # thresholds differ a little


def test_one_run_p_values():
    """At delta = 0 it is a binomial tail; delta and fewer correct guesses only raise it."""
    p = math.e / (1 + math.e)
    assert one_run_p_value(1.0, 0.0, 100, 50, 45) == pytest.approx(stats.binom.sf(44, 50, p))
    assert one_run_p_value(1.0, 1e-3, 100, 50, 45) > one_run_p_value(1.0, 0.0, 100, 50, 45)
    values = [one_run_p_value(1.0, 1e-5, 100, 50, v) for v in range(51)]
    assert values == sorted(values, reverse=True)


def test_one_run_bound_against_randomised_response():
    """m independent bits through randomised response with epsilon 2: the bound is below it and gets close."""
    rng = np.random.default_rng(5)
    m, epsilon = 2_000, 2.0
    found = []
    for _ in range(40):
        correct = rng.binomial(m, math.exp(epsilon) / (1 + math.exp(epsilon)))
        found.append(one_run_lower_bound(m, m, int(correct), 0.0, 0.9).epsilon)
    assert np.sum(np.array(found) > epsilon) <= 13  # 4 expected; once in 10^4
    assert np.mean(found) > 0.85 * epsilon


def test_one_run_bound_of_luck_is_nothing():
    assert one_run_lower_bound(1000, 1000, 500, 1e-5).epsilon == 0
    assert one_run_lower_bound(1000, 0, 0, 1e-5).epsilon == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda: epsilon_lower_bound(np.zeros(2), np.zeros(2), 1e-5),
        lambda: epsilon_lower_bound(np.zeros(100), np.zeros(100), -1.0),
        lambda: epsilon_lower_bound(np.zeros(100), np.zeros(100), 1e-5, 1.0),
        lambda: one_run_lower_bound(10, 11, 5, 1e-5),
        lambda: one_run_lower_bound(10, 5, 6, 1e-5),
    ],
)
def test_nonsense_is_refused(call):
    with pytest.raises(mm.ModelMixError):
        call()
