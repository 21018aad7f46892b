"""The facts the proof rests on, and the refusal of laws that break them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import modelmix as mm
from modelmix.accounting import accountant
from modelmix.accounting.facts import CHECKED_ORDERS, convexity, width_growth
from modelmix.accounting.moments import log_moments
from modelmix.accounting.quadrature import panel_rule

WIDTHS = [0.05, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 16.0, 30.0, 80.0]
FAMILIES = {"gaussian": mm.Gaussian, "laplace": mm.Laplace}
ROUNDING = 1e-9


# Fact 1: the worst direction.


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bound", [0.05, 0.5, 3.0, 12.0])
def test_moments_are_convex_in_the_clipped_norm(family, width, bound):
    """h_k(sqrt(x)) for the Gaussian, h_k(x) for the Laplace law; orders to 32."""
    assert np.all(convexity(mm.Mixed(FAMILIES[family](1.0), width), bound) >= -ROUNDING)


@given(data=st.data(), width=st.floats(0.05, 80), bound=st.floats(0.01, 6), family=st.sampled_from(list(FAMILIES)))
def test_convexity_between_any_three_points(data, width, bound, family):
    law = mm.Mixed(FAMILIES[family](1.0), width)
    x = np.array(sorted(data.draw(st.floats(0, bound**law.norm)) for _ in range(2)))
    t = data.draw(st.floats(0.05, 0.95))
    h = [log_moments(law, v ** (1 / law.norm), CHECKED_ORDERS) for v in (x[0], (1 - t) * x[0] + t * x[1], x[1])]
    assert np.all(h[1] <= ((1 - t) * h[0] + t * h[2]) * (1 + ROUNDING) + 1e-13)


@given(
    direction=st.lists(st.floats(-1, 1), min_size=2, max_size=12).filter(lambda v: max(map(abs, v)) > 1e-3),
    p=st.integers(1, 12), z=st.floats(0.1, 5), omega=st.floats(0.01, 50), law=st.sampled_from(list(FAMILIES)),
)  # fmt: skip
def test_no_clipped_gradient_beats_the_worst_one(direction, p, z, omega, law):
    """Any direction, clipped as Algorithm 2 does, has moments below those of the gradient that is accounted for."""
    mechanism = mm.Mechanism(z, 1.0, omega, p, law=law, dimension=len(direction))
    norm = mechanism.coordinate_law.norm
    v = np.abs(np.array(direction))
    v = v / max(np.linalg.norm(v, norm), 1e-12)
    v = np.minimum(v, 1 / math.sqrt(p))
    orders = np.array([2.0, 3.0, 8.0, 20.0])
    total = sum(log_moments(mechanism.coordinate_law, float(x), orders) for x in v if x > 0)
    worst = sum(count * log_moments(mechanism.coordinate_law, s, orders) for s, count in mechanism.worst_gradient)
    assert np.all(total <= worst * (1 + ROUNDING) + 1e-13)


# Fact 2: the width.


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("shift", [0.01, 0.3, 2.0, 10.0])
def test_wider_mixing_never_raises_a_moment(family, width, shift):
    assert np.all(width_growth(mm.Mixed(FAMILIES[family](1.0), width), shift) <= ROUNDING)


@given(
    width=st.floats(0.02, 100),
    factor=st.floats(1, 3),
    shift=st.floats(0.01, 10),
    family=st.sampled_from(list(FAMILIES)),
)
def test_wider_mixing_never_raises_a_moment_anywhere(width, factor, shift, family):
    base = FAMILIES[family](1.0)
    narrow, wide = (log_moments(mm.Mixed(base, w), shift, CHECKED_ORDERS) for w in (width, width * factor))
    assert np.all(wide <= narrow * (1 + ROUNDING))


# Fact 3: the adjacency.


@given(
    width=st.floats(0.05, 80), shift=st.floats(0.05, 6), q=st.floats(0.001, 0.999), alpha=st.integers(2, 32),
    family=st.sampled_from(list(FAMILIES)),
)  # fmt: skip
def test_removing_a_sample_is_the_worst_case(width, shift, q, alpha, family):
    """D_alpha((1-q)P + qP' || P) >= D_alpha(P || (1-q)P + qP'), by quadrature."""
    law = mm.Mixed(FAMILIES[family](1.0), width)
    rule = panel_rule(law, shift, float(alpha), 2)
    x = [(piece.x, piece.origin) for piece in rule.pieces]
    log_p = np.concatenate([law.log_density(a, o) for a, o in x])
    log_q = np.concatenate([law.log_density(a - shift, o) for a, o in x])
    log_w = np.log(np.concatenate([piece.weight for piece in rule.pieces]))
    log_mix = np.logaddexp(math.log1p(-q) + log_p, math.log(q) + log_q)
    remove = np.logaddexp.reduce(log_w + alpha * log_mix + (1 - alpha) * log_p)
    add = np.logaddexp.reduce(log_w + alpha * log_p + (1 - alpha) * log_mix)
    assert add <= remove + 1e-11


# Laws of the user's own.


@dataclass(frozen=True)
class Copy(mm.Law):
    """A Gaussian that the package does not know: the checks and the panel rule must do without the closed form."""

    z: float
    norm: ClassVar[int] = 2

    @property
    def scale(self):
        return self.z

    @property
    def variance(self):
        return self.z**2

    def log_density(self, x, origin=0.0):
        return mm.Gaussian(self.z).log_density(x, origin)

    def log_mass(self, lower, upper, width):
        return mm.Gaussian(self.z).log_mass(lower, upper, width)

    def sample(self, rng, size):
        return rng.normal(0, self.z, size)


@dataclass(frozen=True)
class Logistic(Copy):
    """Density sech^2(x/2z)/4z: tails like Laplace's, so convex in |v| but not in v^2 for large shifts."""

    norm: ClassVar[int] = 2

    def log_density(self, x, origin=0.0):
        t = np.abs(x + origin) / self.z
        return -t - 2 * np.log1p(np.exp(-t)) - math.log(self.z)


class LogisticL1(Logistic):
    norm: ClassVar[int] = 1


class Student(Copy):
    """Heavy tails (3 degrees of freedom): moments grow like logarithms, far from convex in either norm."""

    norm: ClassVar[int] = 1

    def log_density(self, x, origin=0.0):
        t = (x + origin) / self.z
        return -2 * np.log1p(t * t / 3) + math.log(2 / (math.pi * math.sqrt(3))) - math.log(self.z)


class Lopsided(Copy):
    def log_density(self, x, origin=0.0):
        return mm.Gaussian(self.z).log_density(x - 0.1 * self.z, origin)


class Unnormalised(Copy):
    def log_density(self, x, origin=0.0):
        return mm.Gaussian(self.z).log_density(x, origin) - 0.1


class GaussianInName(mm.Gaussian):
    """Overrides the density of a known law and inherits its closed forms, which must then not be used."""

    def log_density(self, x, origin=0.0):
        return mm.Gaussian(self.z / 4).log_density(x, origin)


class LaplaceInName(mm.Laplace):
    def log_density(self, x, origin=0.0):
        return mm.Laplace(self.z / 4).log_density(x, origin)


@pytest.mark.parametrize(("pretender", "law"), [(GaussianInName, "gaussian"), (LaplaceInName, "laplace")])
def test_a_subclass_is_a_law_of_its_own(pretender, law):
    """Its epsilon is that of the density it has, not of the law it claims to be."""
    claimed = mm.epsilon(mm.Mechanism(2.0, 0.1, law=pretender), 1e-5, steps=10)
    true = mm.epsilon(mm.Mechanism(0.5, 0.1, law=law), 1e-5, steps=10)
    assert claimed >= true * (1 - 1e-9)


@pytest.mark.parametrize("omega", [0.0, 3.0])
def test_an_unknown_law_that_obeys_gets_the_same_epsilon(omega):
    own = mm.Mechanism(0.8, 0.05, omega, 4, law=Copy)
    known = mm.Mechanism(0.8, 0.05, omega, 4)
    moments = mm.epsilon(known, 1e-5, steps=200, by="renyi")
    assert mm.epsilon(own, 1e-5, steps=200) == pytest.approx(moments, rel=1e-8)
    assert mm.epsilon(own, 1e-5, steps=200) >= mm.epsilon(known, 1e-5, steps=200) * (1 - 1e-11)


@pytest.mark.parametrize(("z", "q", "steps"), [(10.0, 1e-6, 10**6), (5.0, 1e-3, 10), (0.1, 0.5, 3)])
def test_panels_reach_the_peak_of_an_unknown_law(z, q, steps, monkeypatch):
    """Large orders put the integrand's peak thousands of scales away; a rule that stops short would be too small."""
    monkeypatch.setattr(accountant, "real_curve", lambda mechanism: None)  # for known laws only
    laws = (Copy, "gaussian")
    own, known = (mm.epsilon(mm.Mechanism(z, q, law=law), 1e-5, steps=steps, by="renyi") for law in laws)
    assert own >= known * (1 - 1e-9)
    assert own <= known * (1 + 1e-3)


class MixedInName(mm.Mixed):
    def log_density(self, x, origin=0.0):
        return mm.Laplace(0.01).log_density(x, origin)


def test_a_subclass_of_mixed_is_a_law_of_its_own():
    """Nothing of the real mixed law is used for it; here its kinks do not fit its density, which is noticed."""
    pretender = mm.Mechanism(1.0, 0.1, law=lambda z: MixedInName(mm.Gaussian(z), 50.0))
    with pytest.raises(mm.UnprovedError, match="integrates to"):
        mm.epsilon(pretender, 1e-5, steps=100)


def test_logistic_noise_is_covered_for_l1_clipping():
    assert 0 < mm.epsilon(mm.Mechanism(2.0, 0.05, law=LogisticL1), 1e-5, steps=10) < 10


@pytest.mark.parametrize(
    ("law", "z", "rule"),
    [
        (Logistic, 0.05, "worst gradient"),
        (Student, 0.3, "worst gradient"),
        (Lopsided, 1.0, "symmetric"),
        (Unnormalised, 1.0, "probability density"),
    ],
)
def test_a_law_that_breaks_a_fact_is_refused(law, z, rule):
    for call in (
        lambda: mm.epsilon(mm.Mechanism(z, 0.05, law=law), 1e-5, steps=10),
        lambda: mm.delta(mm.Mechanism(z, 0.05, law=law), 1.0, steps=10),
        lambda: mm.rdp(mm.Mechanism(z, 0.05, law=law), [2.0]),
        lambda: mm.epsilon_curve(mm.Mechanism(z, 0.05, law=law), [10], 1e-5),
        lambda: mm.max_steps(mm.Mechanism(z, 0.05, law=law), epsilon=1, delta=1e-5),
        lambda: mm.epsilon(mm.Ledger().add(mm.Mechanism(z, 0.05, law=law), 10), 1e-5),
    ):
        with pytest.raises(mm.UnprovedError, match=rule) as refusal:
            call()
        assert "\n" not in str(refusal.value)
        assert refusal.value.fix


def test_a_law_without_interval_masses_cannot_be_mixed():
    with pytest.raises(mm.ModelMixError, match="log_mass"):
        mm.epsilon(mm.Mechanism(1.0, 0.05, 2.0, law=_Bare), 1e-5, steps=10)


@dataclass(frozen=True)
class _Bare(mm.Law):
    z: float
    norm: ClassVar[int] = 2
    scale: ClassVar[float] = 1.0
    variance: ClassVar[float] = 1.0

    def log_density(self, x, origin=0.0):
        return mm.Gaussian(self.z).log_density(x, origin)

    def sample(self, rng, size):
        return rng.normal(0, self.z, size)
