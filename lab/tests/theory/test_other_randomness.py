"""Randomness beyond noise: numbers where a worst gradient is known, refusals where not, and the negative examples."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

import modelmix as mm
from modelmix.accounting.laws import Gaussian, Mixed
from modelmix.accounting.moments import log_moments
from modelmix.theory.mixing_price import fisher_information
from modelmix_lab.experiments import other_randomness as experiment
from modelmix_lab.theory import counterexamples, other_randomness, rounding, sphere

ORDERS = np.array([2.0, 3.0, 8.0, 20.0])


def gaussian_moments(variance: float, shift: float = 1.0) -> np.ndarray:
    return ORDERS * (ORDERS - 1) * shift**2 / (2 * variance)


def test_langevin_noise_adds_its_variance():
    both = other_randomness.langevin(mm.Mechanism(3.0, 0.1), 4.0)
    assert both == mm.Mechanism(5.0, 0.1)
    # sqrt(2 eta T) of a step over eta * c/B of a clip.
    assert other_randomness.langevin_std(0.1, 2e-6, 4.0, 100) == pytest.approx(
        math.sqrt(2 * 0.1 * 2e-6) / (0.1 * 4.0 / 100)
    )
    with pytest.raises(mm.ModelMixError):
        other_randomness.langevin(mm.Mechanism(1.0, 0.1, 2.0), 1.0)


def test_a_bounded_density_is_the_law_it_should_be():
    """The uniform by its density is mixing, by another way; a triangle has its own variance."""
    uniform = other_randomness.bounded(0.7, lambda x: np.full_like(x, 1 / 3), 1.5)
    mixed = Mixed(Gaussian(0.7), 3.0)
    assert uniform.variance == pytest.approx(mixed.variance)
    assert log_moments(uniform, 1.0, ORDERS) == pytest.approx(log_moments(mixed, 1.0, ORDERS), rel=1e-9)
    triangle = other_randomness.bounded(0.7, lambda x: 1 - np.abs(x), 1.0)
    assert triangle.variance == pytest.approx(0.49 + 1 / 6)
    for bad, error in (
        (lambda x: np.where(x > 0, 1.0, 0.0), mm.UnprovedError),
        (lambda x: np.full_like(x, 2.0), mm.ModelMixError),
        (lambda x: np.where(np.abs(x) < 0.37, 1 / 0.74, 0.0), mm.ModelMixError),
    ):
        with pytest.raises(error):
            other_randomness.bounded(0.7, bad, 1.0)


@settings(max_examples=6)
@given(half=st.floats(0.05, 1.2), z=st.floats(0.8, 3))
def test_two_points_help_and_never_more_than_a_gaussian_of_their_variance(half, z):
    law = other_randomness.Discrete(z, (-half, half), (0.5, 0.5))
    other_randomness.require_convex(law)
    moments = log_moments(law, 1.0, ORDERS)
    assert np.all(moments <= gaussian_moments(z**2) * (1 + 1e-9))
    assert np.all(moments >= gaussian_moments(law.variance) * (1 - 1e-9))
    assert fisher_information(law) * law.variance >= 1 - 1e-6


def test_two_points_against_a_direct_sum():
    """One step, no sampling: the moment by plain quadrature on a fine grid."""
    law = other_randomness.Discrete(1.0, (-0.8, 0.8), (0.5, 0.5))
    x = np.linspace(-14, 17, 200_001)
    f, shifted = np.exp(law.log_density(x)), np.exp(law.log_density(x - 1))
    direct = [math.log(np.sum(shifted**k * f ** (1 - k)) * (x[1] - x[0])) for k in (2, 3)]
    assert log_moments(law, 1.0, np.array([2.0, 3.0])) == pytest.approx(direct, rel=1e-6)
    found = mm.epsilon(other_randomness.coordinatewise(law, 1.0), 1e-5, steps=1, by="renyi")
    assert (
        mm.epsilon(mm.Mechanism(math.sqrt(1.64), 1.0), 1e-5, steps=1, by="renyi")
        < found
        < mm.epsilon(mm.Mechanism(1.0, 1.0), 1e-5, steps=1, by="renyi")
    )


def test_atoms_too_far_apart_are_refused_and_rightly():
    """Two points eight standard deviations apart: the same length over fifty coordinates is worse by 7 %."""
    law = other_randomness.Discrete(0.5, (-2.0, 2.0), (0.5, 0.5))
    with pytest.raises(mm.UnprovedError, match="not convex"):
        other_randomness.coordinatewise(law, 0.1)
    one, small = (log_moments(law, s, np.array([2.0]))[0] for s in (1.0, math.sqrt(0.02)))
    assert 50 * small > 1.07 * one
    with pytest.raises(mm.UnprovedError, match="too narrow"):
        other_randomness.require_convex(other_randomness.Discrete(1e-4, (0.0,), (1.0,)))
    with pytest.raises(mm.UnprovedError, match="symmetric"):
        other_randomness.Discrete(1.0, (0.0, 1.0), (0.5, 0.5))
    with pytest.raises(mm.ModelMixError, match="add up to 1"):
        other_randomness.Discrete(1.0, (-1.0, 1.0), (0.5, 0.4))
    with pytest.raises(mm.ModelMixError, match="made for z"):
        mm.epsilon(
            mm.Mechanism(2.0, 0.1, law=other_randomness.Fixed(other_randomness.Discrete(1.0, (0.0,), (1.0,)))),
            1e-5,
            steps=1,
            by="renyi",
        )


def test_a_sphere_in_one_dimension_is_two_points():
    for z, radius in ((1.0, 1.0), (0.6, 0.3)):
        law = other_randomness.Discrete(z, (-radius, radius), (0.5, 0.5))
        found = sphere.sphere_log_moments(z, radius, 1, 1.0, ORDERS)
        assert found == pytest.approx(log_moments(law, 1.0, ORDERS), rel=1e-8)


@pytest.mark.parametrize(("d", "radius"), [(2, 1.5), (3, 2.0), (10, 3.0), (400, 20.0), (26_010, 40.0)])
def test_a_sphere_lies_between_its_noise_and_a_gaussian_of_its_variance(d, radius):
    found = sphere.sphere_log_moments(1.0, radius, d, 1.0, ORDERS)
    assert np.all(found < gaussian_moments(1.0))
    assert np.all(found > gaussian_moments(1 + radius**2 / d) * (1 - 1e-9))
    if d > 10_000:  # many dimensions: a sphere is a Gaussian to anyone who sees one direction
        assert found == pytest.approx(gaussian_moments(1 + radius**2 / d), rel=1e-3)


def test_a_sphere_by_monte_carlo():
    """d = 3: the second moment as a mean over 10^6 draws, within five standard errors."""
    rng = np.random.default_rng(0)
    z, radius, d, n = 1.0, 2.0, 3, 1_000_000
    x = rng.standard_normal((n, d))
    x = radius * x / np.linalg.norm(x, axis=1, keepdims=True) + z * rng.standard_normal((n, d))

    def log_g(points: np.ndarray) -> np.ndarray:
        t = radius * np.linalg.norm(points, axis=1)
        return -0.5 * np.sum(points**2, axis=1) + np.log(np.sinh(t) / t)  # mean of exp(t cos) in three dimensions

    ratio = np.exp(log_g(x - np.array([1.0, 0, 0])) - log_g(x))
    assert ratio.mean() == pytest.approx(1, abs=5 * ratio.std() / math.sqrt(n))
    squares = ratio**2
    found = math.exp(sphere.sphere_log_moments(z, radius, d, 1.0, np.array([2.0]))[0])
    assert squares.mean() == pytest.approx(found, abs=5 * squares.std() / math.sqrt(n))


def test_epsilon_of_a_sphere():
    plain = mm.epsilon(mm.Mechanism(1.0, 0.05), 1e-5, steps=200, by="renyi")
    small, large = (sphere.Sphere(1.0, radius, 0.05, 10).epsilon(1e-5, 200) for radius in (0.1, 3.0))
    twin = mm.epsilon(mm.Mechanism(math.sqrt(1.9), 0.05), 1e-5, steps=200, by="renyi")
    assert small == pytest.approx(plain, rel=0.01)
    assert twin < large < small <= plain * (1 + 1e-9)
    one = sphere.Sphere(1.0, 1.0, 0.05, 1).epsilon(1e-5, 200)
    law = other_randomness.Discrete(1.0, (-1.0, 1.0), (0.5, 0.5))
    assert one == pytest.approx(
        mm.epsilon(other_randomness.coordinatewise(law, 0.05), 1e-5, steps=200, by="renyi"), rel=1e-6
    )


@pytest.mark.parametrize("d", [1, 2, 3, 10, 100])
def test_the_longest_gradient_is_the_worst_on_a_sphere_up_to_the_radius_that_is_proved(d):
    """The two facts of the proof, in numbers: the variance of a point given the sum, and the growth that follows."""
    k = np.geomspace(1e-2, 300, 400)
    ratio = special.ive(d / 2, k) / special.ive(d / 2 - 1, k)
    assert np.all(np.diff(ratio) / np.diff(k) <= (1 + 1e-9) / d)  # along the mean
    assert np.all(ratio / k <= (1 + 1e-9) / d)  # across it
    radius = math.sqrt(d)
    lengths = np.linspace(0.05, 1, 20)
    moments = np.array([sphere.sphere_log_moments(1.0, radius, d, s, np.array([1.5, 2.0, 8.0])) for s in lengths])
    assert np.all(np.diff(moments, axis=0) > 0)
    assert sphere.Sphere(1.0, radius, 0.1, d).epsilon(1e-5, 10) > 0
    with pytest.raises(mm.UnprovedError, match="shorter gradient"):
        sphere.Sphere(1.0, 1.001 * radius, 0.1, d)


def test_a_sphere_too_wide_to_integrate_is_refused():
    with pytest.raises(mm.ModelMixError, match="at most 60 z"):
        sphere.Sphere(0.1, 50.0, 0.1, 3)


def stochastic_round(x: np.ndarray, grid: float, coins: np.ndarray) -> np.ndarray:
    low = np.floor(x / grid)
    return grid * (low + (coins < x / grid - low))


@given(x=st.floats(-3, 3), v=st.floats(-1, 1), grid=st.floats(0.01, 1), coin=st.floats(0, 1))
def test_with_the_same_coins_rounding_moves_a_coordinate_by_one_spacing_more_at_most(x, v, grid, coin):
    moved = stochastic_round(np.array(x + v), grid, np.array(coin)) - stochastic_round(
        np.array(x), grid, np.array(coin)
    )
    assert abs(moved) <= abs(v) + grid * (1 + 1e-9)


def test_rounding():
    plain = mm.Mechanism(1.0, 0.1)
    assert rounding.rounded_after_noise(plain) is plain
    before = rounding.rounded_before_noise(plain, 0.01, 100)
    assert before.noise_multiplier == pytest.approx(1 / 1.1)
    assert mm.epsilon(before, 1e-5, steps=10) > mm.epsilon(plain, 1e-5, steps=10)
    assert rounding.spacing("bf16", 1.0) == 2**-7
    assert rounding.spacing("fp8-e4m3", 3.0) == 0.25
    assert rounding.dithered(plain, 0.5) == mm.Mechanism(1.0, 0.1, 0.5)
    with pytest.raises(mm.UnprovedError, match="not randomised at all"):
        rounding.rounding_as_noise()
    with pytest.raises(mm.UnprovedError):
        rounding.rounded_before_noise(mm.Mechanism(1.0, 0.1, 2.0), 0.1, 10)
    with pytest.raises(mm.ModelMixError, match="choose one of"):
        rounding.spacing("int4", 1.0)


def test_sums_on_the_grid_are_not_randomised_and_dither_randomises_every_sum():
    rng = np.random.default_rng(0)
    grid, n = 0.25, 200_000
    coins = rng.random(n)
    assert np.ptp(stochastic_round(np.full(n, 1.5), grid, coins)) == 0
    u = grid * (rng.random(n) - 0.5)
    for x in (1.5, 1.6):
        error = grid * np.round((x + u) / grid) - u - x
        assert np.std(error) == pytest.approx(grid / math.sqrt(12), rel=0.01)
        assert abs(np.mean(error)) < 5 * grid / math.sqrt(12 * n)


def test_multiplicative_randomness_gets_an_example_not_a_number():
    assert counterexamples.bounded_example().least_delta(1) == pytest.approx(0.2)
    assert counterexamples.bounded_example().least_delta(10) == pytest.approx(1 - 0.8**10)
    assert counterexamples.erasing_example(32, 32, (16, 16)).least_delta(1) == pytest.approx(1 - 1 / 289)
    assert counterexamples.dropout_example(0.5, 3).least_delta(1) == pytest.approx(1 - 0.125)
    for what in counterexamples.MULTIPLICATIVE:
        with pytest.raises(mm.UnprovedError, match="added, and independent"):
            counterexamples.multiplicative(what)


def test_dropout_does_nothing_to_the_worst_sample():
    """Logistic regression with dropout on features: on x = 0 the clipped gradient is the same for every mask, of
    length c; on an ordinary sample masks do change it. So the worst case is that of plain DP-SGD."""
    rng = np.random.default_rng(0)
    w, c = rng.standard_normal(6), 0.1

    def clipped(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
        kept = np.append(x * mask, 1.0)  # the last is the bias
        g = -kept / (1 + math.exp(float(w @ kept)))
        return g * min(1, c / float(np.linalg.norm(g)))

    masks = rng.integers(0, 2, (50, 5))
    black = np.array([clipped(np.zeros(5), mask) for mask in masks])
    other = np.array([clipped(np.ones(5), mask) for mask in masks])
    assert np.ptp(black, axis=0).max() == 0
    assert np.linalg.norm(black[0]) == pytest.approx(c)
    assert np.ptp(other, axis=0).max() > 0.01


def test_the_commands(run, tmp_path, monkeypatch):
    every = experiment.lines
    monkeypatch.setattr(experiment, "lines", lambda: every((0.4, 2.5)))
    code, out, _ = run("theory", "randomness", "--out", tmp_path / "r.png", "--json")
    data = json.loads(out)
    assert code == 0
    assert (tmp_path / "r.svg").exists()
    for i, best in enumerate(data["Langevin (Gaussian)"]):
        for name in ("sphere, d = 100", "uniform (mixing, dither)", "sphere, d = 3", "two points"):
            value = data[name][i]
            assert value is None or best * (1 - 1e-6) <= value <= data["noise_alone"] * (1 + 1e-6)
    assert data["two points"][-1] is None
    expected = {
        "langevin": mm.epsilon(mm.Mechanism(math.sqrt(2), 0.05), 1e-5, steps=200),
        "uniform": mm.epsilon(mm.Mechanism(1.0, 0.05, 1.0), 1e-5, steps=200),
        "rounding-after": mm.epsilon(mm.Mechanism(1.0, 0.05), 1e-5, steps=200),
    }
    for kind, value in expected.items():
        _, out, _ = run("theory", "randomness", kind, "--json")
        assert json.loads(out)["epsilon"] == pytest.approx(value, rel=1e-9)
    _, out, _ = run("theory", "randomness", "dropout", "--json")
    assert json.loads(out)["epsilon"] is None
    code, text, _ = run("theory", "randomness", "erasing")
    assert code == 0
    assert "no number" in text
    code, _, err = run("theory", "randomness", "two-point", "--size", 4)
    assert code == 2
    assert "not proved" in err
    assert run("theory", "randomness", "magic")[0] == 2
