"""Noise laws: densities against their definitions, samplers against densities."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import density

import modelmix as mm
from modelmix.accounting.facts import mass

LAWS = {
    "gaussian": mm.Gaussian(0.7),
    "laplace": mm.Laplace(0.7),
    "mixed gaussian": mm.Mixed(mm.Gaussian(0.4), 3.0),
    "mixed laplace": mm.Mixed(mm.Laplace(0.4), 3.0),
    "barely mixed gaussian": mm.Mixed(mm.Gaussian(0.4), 1e-6),
    "barely mixed laplace": mm.Mixed(mm.Laplace(0.4), 1e-6),
    "widely mixed gaussian": mm.Mixed(mm.Gaussian(0.4), 3e4),
}


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_integrates_to_one_and_is_symmetric(law):
    assert mass(law) == pytest.approx(1, abs=1e-10)
    x = np.linspace(0, 30, 301)
    np.testing.assert_allclose(law.log_density(x), law.log_density(-x), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
@settings(max_examples=300)
@given(z=st.floats(0.05, 50), width=st.floats(1e-7, 1e5), x=st.floats(-400, 400), edge=st.sampled_from([-1, 0, 1]))
def test_log_density_keeps_its_digits_everywhere(family, z, width, x, edge):
    """Near both edges, in the flat part and hundreds of scales into the tails: half of what the moments grant."""
    base = {"gaussian": mm.Gaussian, "laplace": mm.Laplace}[family](z)
    omega = width * z
    law = mm.Mixed(base, omega)
    ours = law.log_density(np.array([x * z]), edge * omega / 2)[0]
    with mp.workdps(700 if family == "gaussian" and abs(x) > 30 else 200):
        point = mp.mpf(x * z) + mp.mpf(edge) * mp.mpf(omega) / 2
        value = density(family, mp.mpf(z), mp.mpf(omega))(point)
        truth = float(mp.log(value))
    granted = 8 * np.finfo(float).eps * (1 + 2 * abs(truth) + abs(math.log(z)) + abs(math.log(omega)))
    assert abs(ours - truth) <= granted / 2


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_sampler_follows_the_density(law):
    """Kolmogorov-Smirnov at level 1e-6 per law with a fixed seed; the cdf comes from the density."""
    n = 20_000
    draws = np.sort(law.sample(np.random.default_rng(5), n))
    span = 12 * math.sqrt(law.variance)
    grid = np.unique(np.concatenate([np.linspace(-span, span, 200_001), draws[::20]]))
    f = np.exp(law.log_density(grid))
    cdf = np.concatenate([[0], np.cumsum(0.5 * (f[1:] + f[:-1]) * np.diff(grid))])
    theory = np.interp(draws, grid, cdf)
    distance = max(np.max(np.arange(1, n + 1) / n - theory), np.max(theory - np.arange(n) / n))
    assert distance < math.sqrt(-0.5 * math.log(1e-6 / 2) / n) + 1e-3
    assert np.var(draws) == pytest.approx(law.variance, rel=6 * math.sqrt(5 / n))


def test_laplace_ratio_is_bounded_by_pure_privacy():
    law = mm.Mixed(mm.Laplace(0.5), 4.0)
    x = np.linspace(-20, 20, 4001)
    ratio = np.abs(law.log_density(x - 1) - law.log_density(x))
    assert ratio.max() <= law.base.max_log_ratio(1.0) + 1e-12
    assert ratio.max() == pytest.approx(2.0, rel=1e-9)


@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf, "1", True])
def test_refuses_nonsense(bad):
    for make in (mm.Gaussian, mm.Laplace, lambda v: mm.Mixed(mm.Gaussian(1.0), v)):
        with pytest.raises(mm.ModelMixError):
            make(bad)


def test_mixing_twice_is_refused():
    with pytest.raises(mm.ModelMixError, match="once"):
        mm.Mixed(mm.Mixed(mm.Gaussian(1.0), 1.0), 1.0)
