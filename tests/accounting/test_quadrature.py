"""Where moments are summed and what a sum can miss: coverage, lattices, closed forms, and refusals."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import modelmix as mm
from modelmix.accounting import moments
from modelmix.accounting.facts import CHECKED_ORDERS, convexity, mass, require_facts, width_growth
from modelmix.accounting.functions import log_bracket, log_exp_minus_line, log_expm1
from modelmix.accounting.moments import log_excess, log_moments, sampled_log_moments
from modelmix.accounting.quadrature import panel_rule, rule_is_proved, strip_rule
from modelmix.accounting.renyi import orders_at, sampled_curve

LAWS = {
    "gaussian": mm.Gaussian(0.7),
    "laplace": mm.Laplace(0.7),
    "mixed gaussian": mm.Mixed(mm.Gaussian(0.4), 3.0),
    "mixed laplace": mm.Mixed(mm.Laplace(0.4), 3.0),
    "wide gaussian": mm.Mixed(mm.Gaussian(0.4), 60.0),
    "wide laplace": mm.Mixed(mm.Laplace(0.4), 60.0),
}


def points(rule):
    return np.concatenate([p.origin + p.x for p in rule.pieces]), np.concatenate([p.weight for p in rule.pieces])


# The strip rule.


@settings(max_examples=30)
@given(z=st.floats(0.1, 10), width=st.floats(0, 300), shift=st.floats(1e-4, 5), k=st.floats(1.5, 200))
def test_the_strip_rule_aims_at_thirteen_digits_and_covers_what_counts(z, width, shift, k):
    """Lattices of one step, as far as the tails need, with errors far below the smallest A_k - 1 there can be."""
    law = mm.Mixed(mm.Gaussian(z), width * z) if width > 0.01 else mm.Gaussian(z)
    omega = law.omega / z if isinstance(law, mm.Mixed) else 0.0
    rule = strip_rule(law, shift * z, k)
    # By Hammersley, Chapman and Robbins A_2 - 1 >= s^2/variance: errors are relative to A_k + 2k, flat is absolute.
    smallest = min(1.0, shift**2 / (1 + omega**2 / 12))
    assert 0 < rule.relative * (2 * k + 1) <= 1e-13 * smallest
    assert 0 <= rule.flat <= 1e-13 * smallest
    h = float(rule.pieces[0].weight[0]) / z
    a = np.linspace(0.005, 1.405, 281)
    log_c = 0.5 * a * a - (k - 1) * np.log1p(-0.5 * a * a)
    exact = 2 * math.exp(np.min(log_c - log_expm1(2 * np.pi * a / h)))
    assert exact <= rule.relative <= 1.1 * exact, "the theorem's bound for the step that is used, rounded up"
    for piece in rule.pieces:
        np.testing.assert_allclose(np.diff(piece.x), h * z, rtol=1e-6)
        np.testing.assert_allclose(piece.weight, h * z, rtol=1e-12)
    x, _ = points(rule)
    reach = math.sqrt(2 * 30)  # exp(-30) of a Gaussian's peak
    assert x.min() <= -(omega / 2 + reach) * z
    assert x.max() >= (omega / 2 + k * shift + reach) * z
    assert x.size * h <= omega + 2 * k * shift + 100, "and no more than that"
    if len(rule.pieces) == 2:
        right, left = rule.pieces
        assert (right.origin, left.origin) == (law.omega / 2, -law.omega / 2)
        assert round(omega / h) * h == pytest.approx(omega, rel=1e-9), "both edges lie on one lattice"
        assert right.origin + right.x[0] > left.origin + left.x[-1], "no point counts twice"
        # Between the windows both densities are flat to rounding.
        middle = np.linspace(left.origin + left.x[-1], right.origin + right.x[0], 7)
        ratio = law.log_density(middle - shift * z) - law.log_density(middle)
        assert k * np.abs(ratio).max() <= max(math.sqrt(rule.flat), 1e-14 * k * (1 + abs(math.log(law.omega)) * 10))


def test_a_wide_law_needs_no_points_in_its_flat_part():
    narrow, wide, wider = (strip_rule(mm.Mixed(mm.Gaussian(1.0), w), 0.5, 8.0) for w in (5.0, 100.0, 1e5))
    assert [len(rule.pieces) for rule in (narrow, wide, wider)] == [1, 2, 2]
    assert narrow.flat == 0 < wide.flat
    assert points(wider)[0].size < 3 * points(narrow)[0].size


@given(width=st.floats(0.05, 500), shift=st.floats(1e-3, 3), k=st.integers(2, 60))
@settings(max_examples=40)
def test_upper_bounds_are_tight(width, shift, k):
    """What is added to a sum is rounding: of log-densities at a peak k*s scales away, and of small shifts."""
    law = mm.Mixed(mm.Gaussian(1.0), width)
    order = np.array([float(k)])
    value, bound = moments._sum(law, shift, order, strip_rule(law, shift, float(k)))
    slack = float(bound[0] - value[0])
    assert 1e-16 < slack < 1e-11 + 1e-14 * k * (1 + (k * shift) ** 2) + 6e-13 * (1 + math.log1p(width)) / shift


# The panel rule.


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
@pytest.mark.parametrize("shift", [0.0, 0.013, 1.0, 5.0])
@pytest.mark.parametrize("halvings", [0, 1])
def test_panels_tile_the_line_and_integrate_both_densities(law, shift, halvings):
    rule = panel_rule(law, shift, 6.0, halvings)
    x, w = points(rule)
    f, g = (np.exp(np.concatenate([law.log_density(p.x - s, p.origin) for p in rule.pieces])) for s in (0.0, shift))
    assert np.all(w > 0)
    assert w @ f == pytest.approx(1, abs=1e-9)
    assert w @ g == pytest.approx(1, abs=1e-9)
    assert w @ (f * x**2) == pytest.approx(law.variance, rel=1e-8)
    assert w @ (g * x) == pytest.approx(shift, abs=1e-8)
    kinks = sorted({kink + s for kink in law.kinks for s in (0.0, shift)})
    for lower, upper in pairwise(kinks):
        inside = (x > lower) & (x < upper)
        assert w[inside].sum() == pytest.approx(upper - lower, rel=1e-9), "panels end at kinks"
    order = np.argsort(x)
    assert np.all(np.diff(x[order]) > 0)
    ends = np.sort(np.concatenate([[p.origin + p.x[0], p.origin + p.x[-1]] for p in rule.pieces]))
    assert w.sum() == pytest.approx(ends[-1] - ends[0], rel=0.05), "no gap and no overlap"


@pytest.mark.parametrize("k", [1.5, 2.0, 7.0, 40.0])
@pytest.mark.parametrize("law", [LAWS["gaussian"], LAWS["laplace"]], ids=["gaussian", "laplace"])
@pytest.mark.parametrize("shift", [0.1, 0.7, 3.0])
def test_panels_reach_the_peak_of_every_order(law, shift, k):
    """A_k in closed form, whose integrand peaks at k times the shift for Gaussian noise."""
    rule = panel_rule(law, shift, k, 1)
    log_f, log_g = (np.concatenate([law.log_density(p.x - s, p.origin) for p in rule.pieces]) for s in (0.0, shift))
    log_w = np.log(np.concatenate([p.weight for p in rule.pieces]))
    found = np.logaddexp.reduce(log_w + k * log_g + (1 - k) * log_f)
    assert found == pytest.approx(
        float(np.logaddexp(0, law.exact_log_excess(shift, np.array([k])))[0]), rel=1e-9, abs=1e-4
    )


def test_halving_cuts_every_panel_in_two():
    for law in LAWS.values():
        sizes = [points(panel_rule(law, 0.3, 5.0, halvings))[0].size for halvings in (0, 1, 2)]
        assert sizes[1] == 2 * sizes[0]
        assert sizes[2] == 4 * sizes[0]


# Laws that the rules cannot serve.


@dataclass(frozen=True)
class Shaped(mm.Law):
    """A law of somebody's own; the density is what a test needs."""

    z: float
    norm: ClassVar[int] = 2
    variance: ClassVar[float] = 1.0

    @property
    def scale(self):
        return self.z

    def log_density(self, x, origin=0.0):
        return mm.Gaussian(self.z).log_density(x, origin)

    def log_mass(self, lower, upper, width):
        return mm.Gaussian(self.z).log_mass(lower, upper, width)

    def sample(self, rng, size):
        return rng.normal(0, self.z, size)


class Flat(Shaped):
    def log_density(self, x, origin=0.0):
        return np.full_like(x, -1.0)


class Box(Shaped):
    """Uniform on (-1, 1): a shift puts mass where there was none."""

    kinks: ClassVar[tuple[float, ...]] = (-1.0, 1.0)

    def log_density(self, x, origin=0.0):
        with np.errstate(divide="ignore"):
            return np.log(np.where(np.abs(x + origin) < 1, 0.5, 0.0))


class Broken(Shaped):
    def log_density(self, x, origin=0.0):
        return np.where(np.abs(x + origin) > 3 * self.z, np.nan, super().log_density(x, origin))


class Rough(Shaped):
    """Ripples far below the scale, of which ``kinks`` says nothing."""

    def log_density(self, x, origin=0.0):
        return super().log_density(x, origin) + 0.3 * np.sin(3e7 * (x + origin)) ** 2


class Narrowing(Shaped):
    """Pretends that a wider mixing leaves less noise."""

    def log_mass(self, lower, upper, width):
        middle = 0.5 * (lower + upper)
        return math.log(width) + mm.Gaussian(self.z * (1 + 1 / (1 + width))).log_density(middle)


class Third(Shaped):
    norm: ClassVar[int] = 3


@dataclass(frozen=True)
class Skewed(Shaped):
    """A little more on the right, by a tenth of what the check can tell."""

    tilt: float = 1e-3

    def log_density(self, x, origin=0.0):
        return super().log_density(x, origin) + self.tilt * np.tanh((x + origin) / self.z)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("law", [Box(1.0), Broken(1.0)])
def test_moments_that_do_not_exist_are_infinite_or_refused(law):
    """By the panels of a law that reaches everywhere, so that the sum itself is asked."""
    rule, k = panel_rule(Shaped(1.0), 0.3, 5.0, 1), np.array([2.0, 5.0])
    for found in moments._sum(law, 0.3, k, rule):
        assert np.all(np.isposinf(found))
    with pytest.raises(mm.UnprovedError):
        log_moments(law, 0.3, k)


class Empty(Shaped):
    """No mass beyond 20 scales, where the shifted one has none either."""

    def log_density(self, x, origin=0.0):
        return np.where(np.abs(x + origin) > 20 * self.z, -np.inf, super().log_density(x, origin))


def test_where_neither_density_is_there_is_nothing_to_sum():
    wide, k = panel_rule(Shaped(1.0), 0.0, 2.0, 1), np.array([2.0, 3.0])
    beyond = type(wide.pieces[0])(0.0, np.array([25.0, 30.0]), np.array([5.0, 5.0]))
    value, bound = moments._sum(Empty(1.0), 0.3, k, type(wide)((*wide.pieces, beyond), 0.0, 0.0))
    truth = mm.Gaussian(1.0).exact_log_excess(0.3, k)
    np.testing.assert_allclose(value, truth, atol=1e-9)
    assert np.all(bound >= truth - 1e-12)


def test_integrals_that_do_not_fall_off_or_settle_are_refused():
    with pytest.raises(mm.UnprovedError, match="fall off"):
        log_moments(Flat(1.0), 0.3, np.array([2.0]))
    with pytest.raises(mm.UnprovedError, match="settle"):
        log_moments(Rough(1.0), 0.3, np.array([2.0, 4.0]))


@dataclass(frozen=True)
class Scaled(Shaped):
    more: float = 0.0

    def log_density(self, x, origin=0.0):
        return super().log_density(x, origin) + self.more


def gate(law, omega=0.0):
    require_facts(mm.Mechanism(1.0, 0.1, omega, law=law))


@pytest.mark.parametrize(
    ("law", "omega", "message"),
    [
        (Third, 0.0, "norm = 3"),
        (Skewed, 0.0, "symmetric"),
        (lambda z: Scaled(z, 2e-6), 0.0, "probability density"),
        (lambda z: Scaled(z, -2e-6), 0.0, "probability density"),
        (Narrowing, 3.0, "wider"),
    ],
)
def test_an_unknown_law_that_breaks_a_fact_is_refused(law, omega, message):
    with pytest.raises(mm.ModelMixError, match=message):
        gate(law, omega)


def test_an_unknown_law_that_keeps_the_facts_passes():
    gate(lambda z: Scaled(z, 1e-8))  # what rounding leaves of a density is one


# The facts as numbers.


def test_convexity_and_width_growth_of_laws_known_in_closed_form():
    """h_k(sqrt(x)) of a Gaussian is a straight line; h_k(x) of a Laplace law curves; widths never help an attacker."""
    assert np.abs(convexity(mm.Gaussian(0.8), 1.0)).max() < 1e-9
    law, x = mm.Laplace(0.8), np.linspace(0, 1.5, 24)
    h = np.array([np.logaddexp(0, law.exact_log_excess(v, CHECKED_ORDERS)) if v else 0 * CHECKED_ORDERS for v in x])
    wanted = np.min(np.diff(h, 2, axis=0), axis=0) / h[-1]
    np.testing.assert_allclose(convexity(law, 1.5), wanted, atol=1e-11)
    mixed = mm.Mixed(mm.Gaussian(1.0), 2.0)
    widths = (1.0, 1.1, 1.5, 2.0, 3.0, 5.0, 10.0)
    h = np.array([log_moments(mm.Mixed(mm.Gaussian(1.0), 2.0 * w), 0.5, CHECKED_ORDERS) for w in widths])
    np.testing.assert_allclose(width_growth(mixed, 0.5), np.max(h[1:] / h[:-1], axis=0) - 1, rtol=1e-12)
    assert mass(Scaled(1.0, 0.25)) == pytest.approx(math.exp(0.25), rel=1e-9)


# Moments where one rule gives way to another.


def test_far_peaks_are_summed_while_it_pays_and_bounded_by_the_plain_law_beyond():
    law, plain = mm.Mixed(mm.Gaussian(1.0), 50.0), mm.Gaussian(1.0)

    def gain(shift, k):
        order = np.array([float(k)])
        return float((plain.exact_log_excess(shift, order) - log_excess(law, shift, order))[0])

    assert gain(1.0, 200) > 1, "a peak 200 scales away at an order that is summed"
    assert gain(0.1, 400) > 1, "a large order whose peak is near"
    assert abs(gain(1.0, 300)) < 1e-9, "a large order with a far peak: the plain law"
    assert abs(gain(101.0, 200)) < 1e-6, "a peak beyond 20,000 scales: the plain law"
    assert gain(99.0, 200) > 1
    together = log_excess(law, 1.0, np.array([1.0, 2.0, 17.0, 200.0, 300.0]))
    alone = [log_excess(law, 1.0, np.array([k]))[0] for k in (1.0, 2.0, 17.0, 200.0, 300.0)]
    np.testing.assert_allclose(together, alone, rtol=1e-9)
    assert together[0] == -math.inf


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_the_sign_of_a_shift_does_not_matter_and_tiny_shifts_are_rounded_up(law):
    k = np.array([2.0, 3.0, 9.0])
    np.testing.assert_array_equal(log_excess(law, -0.3, k), log_excess(law, 0.3, k))
    tiny, floor, above = (log_excess(law, s * law.scale, k) for s in (1e-20, 1e-12, 1.1e-12))
    np.testing.assert_array_equal(tiny, floor)
    assert np.all(floor < above)
    assert np.all(np.isneginf(log_excess(law, 0.0, k)))


@pytest.mark.parametrize("family", [mm.Gaussian, mm.Laplace])
def test_mixing_that_rounding_would_lose_is_no_mixing(family):
    k = np.array([2.0, 5.0])
    np.testing.assert_array_equal(log_excess(mm.Mixed(family(1.0), 1e-13), 0.3, k), log_excess(family(1.0), 0.3, k))
    assert np.all(log_excess(mm.Mixed(family(1.0), 1e-2), 0.3, k) < log_excess(family(1.0), 0.3, k))


def test_which_laws_have_a_proved_rule():
    assert rule_is_proved(mm.Gaussian(1.0))
    assert rule_is_proved(mm.Mixed(mm.Gaussian(1.0), 2.0))
    for law in (mm.Laplace(1.0), mm.Mixed(mm.Laplace(1.0), 2.0), Shaped(1.0), mm.Mixed(Shaped(1.0), 2.0)):
        assert not rule_is_proved(law)


# Elementary functions where their branches meet.


@pytest.mark.parametrize("x", [-0.06, -0.05, -0.049, 0.049, 0.05, 0.051, 29.9, 30.0, 30.001, 31.0, 33.0, 36.0])
def test_branches_meet(x):
    """Both sides of every change of formula, to the digits that the next formula needs."""
    with mp.workdps(60):
        line = float(mp.log(mp.expm1(mp.mpf(x)) - mp.mpf(x)))
        k, u = 3.0, mp.mpf(x) / 3
        bracket = float(mp.log(mp.expm1(k * u) - k * mp.expm1(u)))
    assert log_exp_minus_line(np.array([x]))[0] == pytest.approx(line, rel=1e-15, abs=3e-14)
    assert log_bracket(np.array([[k]]), np.array([x / 3]))[0, 0] == pytest.approx(bracket, rel=1e-15, abs=3e-14)


def test_functions_take_whole_numbers():
    assert log_expm1(np.array([2]))[0] == pytest.approx(math.log(math.expm1(2.0)), rel=1e-15)
    assert log_exp_minus_line(np.array([2, 40]))[0] == pytest.approx(math.log(math.expm1(2.0) - 2), rel=1e-14)


# What a sum adds to itself.

K = np.array([2.0, 3.0, 6.0])


@pytest.mark.parametrize("law", [mm.Mixed(mm.Gaussian(0.7), 2.0), mm.Gaussian(1.3), mm.Mixed(mm.Gaussian(0.4), 60.0)])
def test_what_a_rule_can_miss_is_in_the_bound(law):
    """An error of the rule counts as a fraction of A_k + 2k, and what lies between its pieces as it is."""
    honest = strip_rule(law, 0.5, 6.0)
    value, bound = moments._sum(law, 0.5, K, honest)
    assert np.all(value < bound)
    _, flat = moments._sum(law, 0.5, K, replace(honest, flat=0.25))
    np.testing.assert_allclose(np.exp(flat) - np.exp(bound), 0.25, rtol=1e-6)
    _, loose = moments._sum(law, 0.5, K, replace(honest, relative=1e-3))
    missed = np.exp(loose) - np.exp(value)
    assert np.all(missed >= 1e-3 * (np.exp(value) + 1 + 2 * K) * (1 - 1e-9))
    assert np.all(missed <= 2e-3 * (np.exp(value) + 1 + 2 * K))


@pytest.mark.parametrize("law", [mm.Mixed(mm.Gaussian(0.7), 2.0), mm.Gaussian(1.3)])
@pytest.mark.parametrize("beyond", [3.0, 4.0, 5.0])
def test_tails_that_are_left_out_are_in_the_bound(law, beyond):
    """A rule that stops a few deviations behind the peaks misses something, and its bound holds all the same."""
    shift, half = 0.5, law.omega / 2 if isinstance(law, mm.Mixed) else 0.0
    whole = strip_rule(law, shift, 6.0)
    (piece,) = whole.pieces
    truth, _ = moments._sum(law, shift, K, whole)
    for right, left in ((True, False), (False, True), (True, True)):
        keep = np.ones(piece.x.shape, dtype=bool)
        keep &= (piece.x <= half + 6 * shift + beyond * law.scale) | (not right)
        keep &= (piece.x >= -half - beyond * law.scale) | (not left)
        short = replace(whole, pieces=(replace(piece, x=piece.x[keep], weight=piece.weight[keep]),))
        value, bound = moments._sum(law, shift, K, short)
        assert np.all(value <= truth)
        assert np.all(bound >= truth)
        assert np.all(np.exp(bound) <= np.exp(truth) + 40 * K * math.exp(-0.5 * beyond**2)), "and not by much more"


def test_the_size_of_a_block_changes_nothing(monkeypatch):
    law, k = mm.Mixed(mm.Gaussian(0.7), 2.0), np.arange(2.0, 20.0)
    honest = log_excess(law, 0.5, k)
    for block in (1, 1000, 5000):
        monkeypatch.setattr(moments, "_BLOCK", block)
        np.testing.assert_allclose(log_excess(law, 0.5, k), honest, rtol=1e-12)


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
@pytest.mark.parametrize("q", [0.01, 0.6, 1.0])
def test_sampled_moments_at_whole_orders_are_the_binomial_sum(law, q):
    orders = orders_at(0)
    for shift in (0.3, 1.5):
        curve = sampled_curve(log_moments(law, shift, orders), q, 0)
        direct = sampled_log_moments(law, -shift, np.array([2.0, 5.0, 9.0]), q)
        np.testing.assert_allclose(direct, curve[[0, 3, 7]], rtol=1e-7)


def test_panels_that_have_not_settled_pay_for_their_last_change(monkeypatch):
    """Ten times what the last halving changed is added; a change that rounding explains ends the halving."""
    law, k = mm.Mixed(Shaped(1.0), 2.0), np.array([3.0])
    honest, told = moments._sum, []

    def drifting(*arguments):
        value, bound = honest(*arguments)
        told.append(1e-7 / 4 ** len(told))
        return value + told[-1], bound + told[-1]

    monkeypatch.setattr(moments, "_sum", drifting)
    found = moments._summed(law, 0.5, k)
    monkeypatch.undo()
    assert 7 <= len(told) <= 8
    paid = float(found[0] - honest(law, 0.5, k, panel_rule(law, 0.5, 3.0, 7))[1][0]) - told[-1]
    assert paid == pytest.approx(10 * (told[-2] - told[-1]), rel=1e-2)


# Units, far edges and rounding.


@pytest.mark.parametrize("family", [mm.Gaussian, mm.Laplace])
@pytest.mark.parametrize(("width", "shift"), [(0.0, 0.5), (3.0, 0.5), (60.0, 1.0), (3.0, 40.0), (1e-13, 0.5)])
@pytest.mark.parametrize("z", [1e-3, 1e3])
def test_moments_do_not_depend_on_the_unit_of_length(family, width, shift, z):
    """Everything is a ratio of lengths, also where sums give way to the plain law."""
    k = np.array([2.0, 7.0, 150.0, 300.0])

    def found(z):
        return log_excess(mm.Mixed(family(z), width * z) if width else family(z), shift * z, k)

    np.testing.assert_allclose(found(z), found(1.0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", [mm.Gaussian, mm.Laplace])
def test_edges_a_billion_scales_away_keep_their_digits(family):
    """Only what lies about the edges counts, so that A_k - 1 falls like 1/omega, to the last digits."""
    k = np.array([2.0, 7.0])
    near, far = (log_excess(mm.Mixed(family(1.0), width), 0.5, k) for width in (1e3, 1e9))
    np.testing.assert_allclose(far + math.log(1e6), near, atol=2e-11)


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_a_point_is_its_origin_and_the_rest(law):
    x = np.linspace(-5, 5, 41)
    np.testing.assert_allclose(law.log_density(x, 1.25), law.log_density(x + 1.25), rtol=1e-12)
    np.testing.assert_allclose(law.log_density(x, -2.5), law.log_density(x - 2.5), rtol=1e-12)


@pytest.mark.parametrize("family", [mm.Gaussian, mm.Laplace])
def test_a_closed_form_is_never_below_the_truth(family):
    """By 1e-13 and eight parts of rounding; a logarithm of 14,000 is off by 1e-12 as it is computed."""
    rng = np.random.default_rng(3)
    for _ in range(200):
        z, k = 10 ** rng.uniform(-2, 2), rng.integers(2, 300) + rng.choice([0.0, 0.3])
        shift = z * 10 ** rng.uniform(-3, 2.2)
        with mp.workdps(60):
            s, n = mp.mpf(shift) / mp.mpf(z), mp.mpf(float(k))
            if family is mm.Gaussian:
                moment = mp.e ** (n * (n - 1) / 2 * s**2)
            else:
                moment = (n * mp.e ** ((n - 1) * s) + (n - 1) * mp.e ** (-n * s)) / (2 * n - 1)
            truth = mp.log(moment) + mp.log(1 - 1 / moment)
            above = float(mp.mpf(float(log_excess(family(z), shift, np.array([k]))[0])) - truth)
        assert 0.5e-13 + 6e-16 * abs(float(truth)) < above < 2e-13 + 3e-15 * abs(float(truth))


def test_one_order_below_one_is_refused_among_others():
    with pytest.raises(mm.ModelMixError, match="orders 1 and above"):
        log_excess(mm.Gaussian(1.0), 0.3, np.array([2.0, 0.5]))
    with pytest.raises(mm.ModelMixError, match="orders 1 and above"):
        log_excess(mm.Gaussian(1.0), 0.3, np.array([2.0, math.nan]))


@pytest.mark.parametrize("size", [1e50, 1e-50])
def test_rounding_is_granted_for_every_logarithm_that_is_summed(size):
    """log f, log f(x - s), log z and log omega, each with eight bits of the last place, k times."""
    law, k = mm.Mixed(mm.Gaussian(size), 2 * size), np.array([12.0])
    rule = strip_rule(law, 0.5 * size, 12.0)
    value, bound = moments._sum(law, 0.5 * size, k, replace(rule, relative=0.0, flat=0.0))
    summed = 4 * abs(math.log(size))
    assert bound[0] - value[0] >= 0.9 * 12 * 8 * np.finfo(float).eps * summed


def test_a_ratio_that_drowns_in_rounding_counts_as_if_it_were_rounding():
    """Between far edges and for a tiny shift: 2 (k blur)^2 is two parts in a hundred of A_k - 1 there."""
    law, k, shift = mm.Mixed(mm.Gaussian(1.0), 1e6), np.array([100.0]), 1e-9
    rule = strip_rule(law, shift, 100.0)
    value, bound = moments._sum(law, shift, k, replace(rule, relative=0.0, flat=0.0))
    blur = 8 * np.finfo(float).eps * (1 + 3 * math.log(1e6))
    drowned = 2 * (100 * blur) ** 2 / math.exp(value[0])
    assert drowned > 5e-3
    assert bound[0] - value[0] >= 0.9 * math.log1p(drowned)
    assert bound[0] - value[0] < 3 * drowned


class Holed(Shaped):
    """Not a number on one short stretch, where the shifted density is one."""

    def log_density(self, x, origin=0.0):
        hole = np.abs(x + origin - 2.0) < 0.1
        return np.where(hole, np.nan, super().log_density(x, origin))


def test_a_density_that_is_nowhere_a_number_twice_has_no_moments():
    rule, k = panel_rule(Shaped(1.0), 0.5, 5.0, 2), np.array([2.0, 5.0])
    for found in moments._sum(Holed(1.0), 0.5, k, rule):
        assert np.all(np.isposinf(found))


def told(monkeypatch, *answers):
    """Answers of ``_sum`` in order, the last for good; and how often it was asked."""
    asked = []

    def answer(law, shift, k, rule, sample_rate=1.0):
        asked.append(rule)
        value = np.array(answers[min(len(asked), len(answers)) - 1], dtype=float)
        return value, value + 1e-15

    monkeypatch.setattr(moments, "_sum", answer)
    return asked


def test_panels_settle_for_all_orders_together(monkeypatch):
    law, k = mm.Mixed(Shaped(1.0), 2.0), np.array([2.0, 5.0])
    asked = told(monkeypatch, [1.0, 1.0], [1.0, 2.0], [1.0, 3.0], [1.0, 3.0])
    np.testing.assert_allclose(moments._summed(law, 0.5, k), [1.0, 3.0])
    assert len(asked) == 4, "the second order settled last"
    sizes = [points(rule)[0].size for rule in asked]
    assert [size // sizes[0] for size in sizes] == [1, 2, 4, 8]


@pytest.mark.parametrize("answers", [([1.0, 1.0], [1.0, math.inf]), ([1.0, 0.5], *([1.0, n] for n in range(1, 9)))])
def test_one_order_without_a_moment_is_refused_for_all(monkeypatch, answers):
    """The other one's value is never taken for its bound."""
    told(monkeypatch, *answers)
    with pytest.raises(mm.UnprovedError, match="did not settle"):
        moments._summed(mm.Mixed(Shaped(1.0), 2.0), 0.5, np.array([2.0, 5.0]))


def test_orders_that_are_all_infinite_are_infinite(monkeypatch):
    asked = told(monkeypatch, [math.inf, math.inf])
    assert np.all(np.isposinf(moments._summed(mm.Mixed(Shaped(1.0), 2.0), 0.5, np.array([2.0, 5.0]))))
    assert len(asked) == 2
