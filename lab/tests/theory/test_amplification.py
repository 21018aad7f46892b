"""Theorem 4.2: the loss by quadrature against closed forms and the paper's lemmas, and its composition."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special

import modelmix as mm
from modelmix.accounting.laws import Gaussian, Laplace, Mixed
from modelmix.theory.loss import loss_moments
from modelmix_lab.experiments import amplification as experiment
from modelmix_lab.theory import amplification as closed


@settings(max_examples=30)
@given(z=st.floats(0.05, 50), s=st.floats(0.01, 1))
def test_plain_laws_have_closed_forms(z, s):
    gaussian, laplace = (loss_moments(law(z), s) for law in (Gaussian, Laplace))
    assert gaussian.mean == pytest.approx(s * s / (2 * z * z), rel=1e-8)
    assert gaussian.variance == pytest.approx(s * s / (z * z), rel=1e-8)
    t = s / z
    assert laplace.mean == pytest.approx(t + math.expm1(-t), rel=1e-6)
    second = t * t * (1 + math.exp(-t)) / 2 + integrate.quad(lambda x: (2 * x - t) ** 2 * math.exp(-x) / 2, 0, t)[0]
    # o <= 0 loses, o >= s wins, both by t; in between the loss is 2x - t, with x counted from s towards 0.
    assert laplace.variance == pytest.approx(second - laplace.mean**2, rel=1e-6)


def laplace_density(o: float, rate: float, width: float) -> float:
    """The three lines of the paper's appendix."""
    if o <= 0:
        return math.exp(rate * o) * -math.expm1(-rate * width) / (2 * width)
    if o < width:
        return (2 - math.exp(-rate * o) - math.exp(-rate * (width - o))) / (2 * width)
    return math.exp(-rate * (o - width)) * -math.expm1(-rate * width) / (2 * width)


@pytest.mark.parametrize("law", ["laplace", "gaussian"])
@pytest.mark.parametrize(("z", "omega"), [(0.5, 3.0), (1.0, 10.0), (2.0, 40.0), (1.0, 0.7)])
def test_quadrature_meets_the_papers_densities(law, z, omega):
    def f(o: float) -> float:
        if law == "laplace":
            return laplace_density(o + omega / 2, 1 / z, omega)
        o = -abs(o)  # where differences of ndtr keep their digits
        return float(special.ndtr((o + omega / 2) / z) - special.ndtr((o - omega / 2) / z)) / omega

    def moment(power: int, start: float, end: float) -> float:
        def integrand(o: float) -> float:
            return f(o - 1) * math.log(f(o - 1) / f(o)) ** power

        return float(integrate.quad(integrand, start, end, epsabs=1e-13)[0])

    reach = 7 * z if law == "gaussian" else 30 * z
    pieces = [-omega / 2 - reach, *sorted({-omega / 2, omega / 2, 1 - omega / 2, 1 + omega / 2}), 1 + omega / 2 + reach]
    mean, second = (sum(moment(power, *ends) for ends in pairwise(pieces)) for power in (1, 2))
    noise = Laplace(z) if law == "laplace" else Gaussian(z)
    found = loss_moments(Mixed(noise, omega))
    assert found.mean == pytest.approx(mean, rel=1e-6)
    assert found.variance == pytest.approx(second - mean**2, rel=1e-6)


@pytest.mark.parametrize("law", [Laplace(0.3), Laplace(3.0), Gaussian(0.4), Gaussian(3.0)])
def test_mean_and_variance_fall_like_one_over_tau_without_logarithms(law):
    """The paper has log(tau)^3/tau; by quadrature omega times either settles."""
    found = [loss_moments(Mixed(law, omega)) for omega in (300.0, 3e3, 3e4)]
    means, variances = ([getattr(m, name) * w for m, w in zip(found, (300, 3e3, 3e4), strict=True)]
                        for name in ("mean", "variance"))  # fmt: skip
    assert means == pytest.approx([means[-1]] * 3, rel=1e-6)
    assert variances == pytest.approx([variances[-1]] * 3, rel=0.05)


def test_the_lemma_for_gaussian_noise_hides_small_constants():
    """Mean and variance over what stands in the paper's O(...), with the smallest rho it allows: 0.06 and less."""
    ratios = []
    for z in (0.7, 1.0, 3.0):
        for omega in (100.0, 1e3, 1e5):
            assert omega > max(2 * z * math.log(omega) + 2, math.exp(3 / z), 2)  # the lemma's condition
            log_rho = 1 / z + math.sqrt(2 * math.log(omega))
            found = loss_moments(Mixed(Gaussian(z), omega))
            ratios.append(found.mean * omega / (log_rho**2 + z * log_rho))
            ratios.append(found.variance * omega / (log_rho / z**3 + log_rho**3 / z + z * log_rho))
    assert min(ratios) > 0.005
    assert max(ratios) < 0.06


def test_the_lemma_for_laplace_noise_holds():
    """Everywhere on this grid, and it is four times too large at best."""
    ratios = []
    for z in (0.1, 0.3, 1.0, 3.0, 20.0):
        for omega in (2.0, 5.0, 30.0, 1e3, 1e6):
            if omega > max(2 * z * math.log(omega) + 1, 1):
                lemma, exact = closed.laplace_lemma(z, omega), loss_moments(Mixed(Laplace(z), omega))
                ratios += [exact.mean / lemma.mean, exact.variance / lemma.variance]
    assert len(ratios) > 30
    assert max(ratios) < 0.25
    with pytest.raises(mm.ModelMixError, match="too small for the lemma"):
        closed.laplace_lemma(5.0, 10.0)


def test_the_gaussian_failure_probability_is_spelled_out():
    for z, omega in ((1.0, 100.0), (1.0, 1e4), (3.0, 1e3)):
        found = closed.gaussian_lemma(z, omega)
        assert found.exact < found.chance
        assert found.exact > found.chance / 10  # the bound is honest; the event is simply not rare
    width = closed.gaussian_width_needed(1.0, 1000, 1e-5)
    assert 1000 * closed.gaussian_lemma(1.0, width * 1.001).chance < 1e-5
    assert width > 1e9  # the paper's largest omega is 409.6


@pytest.mark.parametrize(("z", "omega", "steps"), [(0.3, 5.0, 30), (1.0, 20.0, 50), (3.0, 8.0, 40)])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_sum_of_losses_stays_below_bernsteins_epsilon(z, omega, steps, count):
    """Whether the gradient is one coordinate or spread over several. 4,000 runs at delta = 0.05: at most 255 may fail,
    four standard errors above 200."""
    mechanism = mm.Mechanism(z, 1.0, omega, law="laplace")
    bound = closed.bernstein(mechanism, 0.05, steps).epsilon
    rng = np.random.default_rng(1)
    law, shift = mechanism.coordinate_law, 1 / count
    o = law.sample(rng, (4000, steps * count)) + shift
    loss = (law.log_density(o.ravel() - shift) - law.log_density(o.ravel())).reshape(o.shape).sum(1)
    assert np.sum(loss > bound) <= 255
    mean = steps * loss_moments(law, shift).mean * count
    assert loss.mean() == pytest.approx(mean, abs=5 * loss.std() / math.sqrt(4000))
    assert np.mean(loss > 0.9 * mean) > 0.3  # such sums do occur


def test_the_printed_deviation_is_too_small():
    """t = sqrt(2) sqrt(T V l + l e0^2/9) + l e0^2/3 must read sqrt(2 T V l + l^2 e0^2/9) + l e0/3.

    z = 100, omega = 1e5, three steps: with probability (z/(2 omega))^3 = 1.25e-10 all three land beyond the far edge,
    where the loss is exactly 1/z each. At delta = 1e-10 the printed bound excludes it.
    """
    z, omega, steps, delta = 100.0, 1e5, 3, 1e-10
    chance = (-math.expm1(-omega / z) * z / (2 * omega)) ** 3
    loss, ell = 1 / z, -math.log(delta)
    found = loss_moments(Mixed(Laplace(z), omega))
    printed = steps * found.mean + math.sqrt(2 * (steps * found.variance * ell + ell * loss**2 / 9)) + ell * loss**2 / 3
    assert chance > delta
    assert steps * loss > printed
    assert closed.bernstein(mm.Mechanism(z, 1.0, omega, law="laplace"), delta, steps).epsilon > steps * loss


def test_where_the_renyi_accountant_is_better_and_where_not():
    """Below epsilon 40 always, on this grid. Above, its orders start at 2 and the loss is nearly its mean."""
    worse = []
    for z in (0.2, 1.0, 5.0):
        for steps in (10, 1000):
            for omega in (5.0, 50.0, 500.0):
                mechanism = mm.Mechanism(z, 1.0, omega, law="laplace")
                renyi = mm.epsilon(mechanism, 1e-5, steps=steps, by="renyi")
                if closed.bernstein(mechanism, 1e-5, steps).epsilon < renyi:
                    worse.append(renyi)
    assert len(worse) >= 3
    assert min(worse) > 40


def test_the_law_sets_in_where_the_window_says():
    mechanism, steps = mm.Mechanism(5.0, 1.0, law="laplace"), 1000
    low, high = closed.law_window(mechanism, 1e-5, steps)
    assert high / low == pytest.approx(144 * 25)

    def slope(omega: float) -> float:
        pair = [mm.Mechanism(5.0, 1.0, w, law="laplace") for w in (omega / 2, omega * 2)]
        first, last = (mm.epsilon(m, 1e-5, steps=steps) for m in pair)
        return math.log(last / first) / math.log(4)

    assert slope(math.sqrt(low * high)) == pytest.approx(-0.5, abs=0.08)
    assert slope(2e6) > -0.35


def test_what_is_not_proved_is_refused():
    with pytest.raises(mm.UnprovedError, match="no largest loss"):
        closed.bernstein(mm.Mechanism(1.0, 1.0, 10.0), 1e-5, 10)
    with pytest.raises(mm.UnprovedError, match="dependent"):
        closed.bernstein(mm.Mechanism(1.0, 0.5, 10.0, law="laplace"), 1e-5, 10)
    with pytest.raises(mm.ModelMixError, match="p must be 1"):
        closed.bernstein(mm.Mechanism(1.0, 1.0, 10.0, p=4, law="laplace"), 1e-5, 10, lemma=True)


@dataclass(frozen=True)
class WideClip(Laplace):
    """Laplace noise with gradients clipped in l2: many small coordinates are then worse than one."""

    norm: ClassVar[int] = 2


def test_the_worst_direction_is_checked():
    closed.require_worst_direction(Mixed(Laplace(0.5), 4.0), 1.0)
    closed.require_worst_direction(Mixed(Gaussian(0.5), 4.0), 1.0)
    with pytest.raises(mm.UnprovedError, match="spreading the gradient"):
        closed.require_worst_direction(WideClip(0.1), 1.0)


@settings(max_examples=15)
@given(z=st.floats(0.3, 5), p=st.integers(2, 60), omega=st.floats(0.5, 100))
def test_truncation_bounds_every_vertex(z, p, omega):
    """sqrt(p) coordinates of 1/sqrt(p), the bound that is used, against the vertex with whole coordinates."""
    mechanism = mm.Mechanism(z, 1.0, omega, p=p, law="laplace")
    law = mechanism.coordinate_law
    vertex = sum(count * loss_moments(law, size).mean for size, count in mechanism.worst_gradient)
    assert closed.bernstein(mechanism, 1e-5, 7).drift >= 7 * vertex * (1 - 1e-12)


def test_the_command(run, tmp_path):
    code, out, _ = run("theory", "amplification", "--out", tmp_path / "a.png", "--json")
    data = json.loads(out)
    assert code == 0
    assert data["gaussian_width_needed"] > 1e9
    i = 12
    mechanism = mm.Mechanism(1.0, 1.0, data["omega"][i], law="laplace")
    assert data["renyi"][i] == mm.epsilon(mechanism, 1e-5, steps=1000, by="renyi")
    assert data["bernstein"][i] == closed.bernstein(mechanism, 1e-5, 1000).epsilon
    assert (tmp_path / "a.svg").exists()


def test_the_slopes_are_those_of_the_accountant():
    (first, *_) = experiment.slopes([10.0 * 1.3**i for i in range(7)])
    low, high = (
        mm.epsilon(mm.Mechanism(1.0, 1.0, w, law="laplace"), 1e-5, steps=1000, by="renyi") for w in (10.0, 10 * 1.3**6)
    )
    assert first.slope[0] == pytest.approx(math.log(high / low) / (6 * math.log(1.3)))
