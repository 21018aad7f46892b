"""Moments against 40-digit quadrature, closed forms and limits; and that they are upper bounds."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from oracle import excess

import modelmix as mm
from modelmix.accounting import moments
from modelmix.accounting.functions import log_bracket, log_expm1
from modelmix.accounting.moments import log_excess, log_moments
from modelmix.accounting.quadrature import panel_rule, strip_rule

FAMILIES = {"gaussian": mm.Gaussian, "laplace": mm.Laplace}


def random_cases(count: int, seed: int):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        z = 10 ** rng.uniform(-1, 1)
        yield z, z * 10 ** rng.uniform(-1.5, 2.3), z * 10 ** rng.uniform(-3, 0.3), int(rng.integers(2, 33))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("z", "omega", "shift", "k"), list(random_cases(8, seed=20)))
def test_random_moments_agree_with_forty_digits(family, z, omega, shift, k):
    law = mm.Mixed(FAMILIES[family](z), omega)
    truth = excess(family, z, omega, shift, k)
    ours = log_excess(law, shift, np.array([k]))[0]
    log_truth = float(mp.log(truth))
    assert ours == pytest.approx(log_truth, abs=1e-9)  # relative 1e-9 of A_k - 1, hence of A_k
    assert ours >= log_truth - 1e-15 * (1 + abs(log_truth))  # the error is added, never subtracted


@pytest.mark.parametrize("shift", [1e-7, 1e-3, 0.1, 1.0, 4.0])
def test_strip_rule_meets_the_closed_form_of_the_plain_gaussian(shift):
    k = np.array([2.0, 3.0, 4.5, 8.0, 40.0])
    law = mm.Gaussian(1.0)
    value, bound = moments._sum(law, shift, k, strip_rule(law, shift, 40.0))
    truth = log_expm1(0.5 * k * (k - 1) * shift**2)
    assert np.all(bound >= truth)
    tolerance = 1e-12 + 1e-15 / shift  # rounding of log f(x - s) - log f(x)
    np.testing.assert_allclose(value, truth, atol=tolerance * 10)
    np.testing.assert_allclose(bound, truth, atol=tolerance * 200)


@pytest.mark.parametrize("shift", [1e-4, 0.1, 1.0, 8.0])
def test_panel_rule_meets_the_closed_form_of_the_plain_laplace(shift):
    k = np.array([2.0, 3.0, 4.5, 8.0, 40.0])
    law = mm.Laplace(1.0)
    value, bound = moments._sum(law, shift, k, panel_rule(law, shift, 40.0, 1))
    truth = law.exact_log_excess(shift, k)
    np.testing.assert_allclose(value, truth, atol=1e-10)
    assert np.all(bound >= truth - 1e-12)


@given(width=st.floats(0.05, 200), shift=st.floats(0.001, 3), k=st.integers(2, 64))
def test_two_rules_agree(width, shift, k):
    """The proved trapezoid and the panels share no points and no error analysis."""
    law = mm.Mixed(mm.Gaussian(1.0), width)
    order = np.array([float(k)])
    strip, strip_bound = moments._sum(law, shift, order, strip_rule(law, shift, float(k)))
    panel, _ = moments._sum(law, shift, order, panel_rule(law, shift, float(k), 5))
    assert strip[0] == pytest.approx(panel[0], abs=1e-9)
    assert strip_bound[0] >= panel[0] - 1e-10


@given(width=st.floats(0.1, 60), shift=st.floats(0.01, 2), k=st.integers(2, 40), scale=st.floats(1.5, 3.0))
def test_the_proved_error_covers_a_coarser_rule(width, shift, k, scale):
    """Coarsen the step until the error shows: it must stay within the bound the theorem gives for that step."""
    assume(k * (k - 1) * shift**2 / 2 < 600)
    law = mm.Mixed(mm.Gaussian(1.0), width)
    fine = strip_rule(law, shift, float(k))
    exact = moments._sum(law, shift, np.array([float(k)]), fine)[0][0]
    h = scale * float(fine.pieces[0].weight[0])
    lattice = h * np.arange(-math.ceil((width + 60) / h), math.ceil((width + 60 + k * shift) / h))
    u = law.log_density(lattice - shift) - law.log_density(lattice)
    coarse = h * np.sum(np.exp(law.log_density(lattice) + log_bracket(np.array([[float(k)]]), u))[0])
    a = np.linspace(0.005, 1.405, 281)
    log_c = 0.5 * a * a - (k - 1) * np.log1p(-0.5 * a * a)
    theorem = np.min(2 * np.exp(log_c) / np.expm1(2 * np.pi * a / h))
    moment = math.exp(exact) + 1
    assert abs(coarse - math.exp(exact)) <= theorem * (moment + 2 * k) + 1e-12 * moment


@pytest.mark.parametrize("family", FAMILIES)
def test_no_mixing_is_the_limit_of_little_mixing(family):
    base = FAMILIES[family](0.5)
    k = np.array([2.0, 5.0, 17.0])
    plain = log_moments(base, 0.3, k)
    for omega, tolerance in ((1e-2, 1e-3), (1e-4, 1e-7), (1e-6, 1e-9), (1e-9, 1e-9)):
        np.testing.assert_allclose(log_moments(mm.Mixed(base, omega), 0.3, k), plain, rtol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_small_shift_follows_fisher_information(family):
    """log A_k = k(k-1)/2 * I * s^2 as s falls, with I the same for every k and at least 1/variance (Cramer-Rao)."""
    law = mm.Mixed(FAMILIES[family](0.5), 2.0)
    s = 1e-6
    k = np.array([2.0, 3.0, 8.0])
    information = log_moments(law, s, k) / (0.5 * k * (k - 1) * s * s)
    np.testing.assert_allclose(information, information[0], rtol=1e-4)
    assert information[0] >= 1 / law.variance


def test_large_orders_fall_back_to_the_plain_law_from_above():
    law = mm.Mixed(mm.Gaussian(1.0), 50.0)
    k = np.array([256.0, 257.0, 300.0, 4096.0])
    h = log_moments(law, 1.0, k)
    assert np.all(h <= 0.5 * k * (k - 1) * (1 + 1e-12))
    assert np.all(np.diff(h) > 0)


def test_orders_at_and_below_one():
    law = mm.Mixed(mm.Gaussian(1.0), 2.0)
    np.testing.assert_array_equal(log_moments(law, 1.0, np.array([1.0])), [0.0])
    np.testing.assert_array_equal(log_moments(law, 0.0, np.array([2.0, 5.0])), [0.0, 0.0])
    with pytest.raises(mm.ModelMixError):
        log_moments(law, 1.0, np.array([0.5]))
