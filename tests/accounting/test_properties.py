"""What the parts of the accountant mean, against closed forms and against each other."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import modelmix as mm
from modelmix.accounting import accountant, pld, renyi
from modelmix.accounting.accountant import delta, epsilon, epsilon_curve, guarantee, rdp, renyi_curve
from modelmix.accounting.moments import log_moments
from modelmix.accounting.pld import pld_epsilon
from modelmix.accounting.renyi import (
    epsilons,
    log_deltas,
    orders_at,
    refine,
    sampled_curve,
    step_curve,
    total_variation,
    worst_loss,
)

# A ledger keeps apart what differs in any field.

BASE = mm.EmbeddingMechanism(1.0, 0.2, 3.0, 4, dimension=50, clip_ratio=2.0)
OTHER = {
    "noise_multiplier": 1.5,
    "sample_rate": 0.1,
    "mixing_width": 2.0,
    "p": 9,
    "law": "laplace",
    "dimension": 3,
    "clip_ratio": 1.0,
}
"""Another value for every field of a mechanism; a field that is added needs one too."""


@pytest.mark.parametrize("name", [field.name for field in fields(mm.EmbeddingMechanism)])
def test_phases_that_differ_in_one_field_are_kept_apart(name):
    base = mm.Mechanism(1.0, 0.2, 3.0, 4, dimension=50) if name == "law" else BASE
    other = replace(base, **{name: OTHER[name]})
    ledger = mm.Ledger().add(base, 2).add(other, 3).add(base, 1)
    assert [(phase.mechanism, phase.steps) for phase in ledger.phases] == [(base, 2), (other, 3), (base, 1)]
    assert [ledger.mechanism_at(step) for step in range(1, 7)] == [base, base, other, other, other, base]
    assert mm.Ledger.from_json(ledger.to_json()) == ledger
    assert mm.Ledger().then(ledger) == ledger
    np.testing.assert_allclose(renyi_curve(ledger)[1], 3 * step_curve(base, 0) + 3 * step_curve(other, 0), rtol=1e-12)
    assert ledger.add(base, 4).phases[-1].steps == 5, "what is the same is one phase"


# Curves: shared, rounded upwards, and straight between the orders that are known.


def test_shared_arrays_cannot_be_written_to():
    for shared in (orders_at(0), step_curve(mm.Mechanism(1.0, 0.1), 0)):
        with pytest.raises(ValueError, match="read-only"):
            shared[0] = 0.0


@pytest.mark.parametrize("level", range(5))
def test_orders_are_whole_rising_and_dense_where_it_matters(level):
    orders = orders_at(level)
    np.testing.assert_array_equal(orders, np.round(orders))
    assert np.all(np.diff(orders) > 0)
    top = (64, 256, 4096, 32768, 131072)[level]
    assert (orders[0], orders[-1]) == (2, top)
    np.testing.assert_array_equal(orders[: min(top, 256) - 1], np.arange(2, min(top, 256) + 1))
    assert np.all(orders[1:] / orders[:-1] <= 1.5), "32 to each doubling"
    assert orders.size <= min(top, 256) + 32 * max(0.0, math.log2(top / 256))


@pytest.mark.parametrize("q", [1e-6, 0.003, 0.1, 0.7])
@pytest.mark.parametrize("scale", [1e-4, 0.3, 20.0])
def test_a_sampled_curve_is_the_binomial_sum_rounded_up(q, scale):
    """Against 50 digits: never below by more than the last bit, which ``guarantee`` pays for, and hardly above."""
    orders = orders_at(1)
    log_a = 0.5 * scale * orders * (orders - 1)
    found = sampled_curve(log_a, q, 1)
    with mp.workdps(50):
        for order in (2, 3, 10, 64, 256):
            terms = (
                mp.binomial(order, k) * mp.mpf(1 - mp.mpf(q)) ** (order - k) * mp.mpf(q) ** k * mp.expm1(log_a[k - 2])
                for k in range(2, order + 1)
            )
            truth = mp.log1p(mp.fsum(terms))
            assert truth * (1 - mp.mpf(2) ** -52) <= mp.mpf(found[order - 2]) <= truth * (1 + mp.mpf(10) ** -10)


def test_an_unknown_first_moment_lies_on_the_line_from_order_one():
    """log A_k is convex and 0 at order 1: half of log A_3 is above log A_2."""
    orders = orders_at(0)
    log_a = 0.2 * orders * (orders - 1)
    line = log_a.copy()
    line[0] = 0.5 * log_a[1]
    log_a[0] = math.nan
    found = sampled_curve(log_a, 0.3, 0)
    np.testing.assert_allclose(found[1:], sampled_curve(line, 0.3, 0)[1:], rtol=1e-12)


@given(z=st.floats(0.01, 30), q=st.floats(1e-5, 1), p=st.integers(1, 60))
def test_the_worst_loss_is_rounded_up(z, q, p):
    with mp.workdps(40):
        truth = mp.log1p(mp.mpf(q) * mp.expm1(1 / mp.mpf(z)))
        found = mp.mpf(worst_loss(mm.Mechanism(z, q, 0.0, p, "laplace")))
        assert truth * (1 - mp.mpf(2) ** -52) <= found <= truth * (1 + mp.mpf(10) ** -12)


# Conversions, order by order.

ORDERS = np.array([1.25, 1.5, 2.0, 3.0, 7.0, 16.0, 64.0])


@pytest.mark.parametrize("at", [1e-9, 1e-5, 0.3])
@pytest.mark.parametrize("rate", [1e-15, 1e-4, 0.01, 0.7, 30.0])
def test_every_order_proves_what_the_theorems_say(rate, at):
    """Mironov's conversion and that of Canonne, Kamath and Steinke, and the deltas that invert them."""
    kappa, a = rate * ORDERS * (ORDERS - 1), ORDERS
    d = rate * ORDERS
    classic = d + math.log(1 / at) / (a - 1)
    np.testing.assert_allclose(epsilons(a, kappa, at, "classic"), classic, rtol=1e-12)
    improved = d + np.log((a - 1) / a) - np.log(at * a) / (a - 1)
    improved = np.where(1 - np.exp(-d) <= at**2, 0.0, np.maximum(improved, 0.0))
    np.testing.assert_allclose(epsilons(a, kappa, at, "improved"), improved, rtol=1e-9, atol=1e-12)
    columns = np.stack([kappa, 2 * kappa], axis=1)
    for conversion in ("classic", "improved"):
        both = [epsilons(a, kappa, at, conversion), epsilons(a, 2 * kappa, at, conversion)]
        np.testing.assert_array_equal(epsilons(a, columns, at, conversion), np.stack(both, axis=1))
        for i, value in enumerate(both[0]):
            back = log_deltas(a, kappa, value, conversion)
            assert np.all(back <= 0)
            if value > 0:
                assert back[i] == pytest.approx(math.log(at), rel=1e-9)
    assert np.all(log_deltas(a, kappa, 0.0, "classic") == 0), "nothing is proved at epsilon = 0 without a reserve"
    assert total_variation(a, kappa) == pytest.approx(math.sqrt(1 - math.exp(-1.25 * rate)), rel=1e-6, abs=1e-9)


def test_unknown_conversions_and_infinite_epsilons():
    for call in (epsilons, log_deltas):
        with pytest.raises(mm.ModelMixError, match="conversion = 'best'"):
            call(ORDERS, ORDERS, 0.5, "best")
    for conversion in ("classic", "improved"):
        found = log_deltas(ORDERS, np.where(ORDERS > 3, math.inf, 1.0), 1e308, conversion)
        assert np.all(found[ORDERS > 3] == 0), "an infinite kappa proves nothing, however large epsilon is"
        assert np.all(found[ORDERS <= 3] < -1e299)


@pytest.mark.parametrize("level", [0, 1])
def test_refining_adds_quarter_orders_on_straight_lines(level):
    orders = orders_at(level)
    kappa = 0.1 * orders * (orders - 1)
    fine, values = refine(orders, kappa)
    quarters = np.arange(1.25, 16, 0.25)
    wanted = np.unique(np.concatenate([orders, quarters]))
    np.testing.assert_array_equal(fine, wanted)
    np.testing.assert_allclose(values, np.interp(wanted, np.append(1, orders), np.append(0, kappa)), rtol=1e-12)
    _, columns = refine(orders, np.stack([kappa, 3 * kappa], axis=1))
    np.testing.assert_allclose(columns, np.stack([values, 3 * values], axis=1), rtol=1e-12)


# What the accountant is asked.


def test_questions_without_an_answer_are_refused():
    mechanism, broken = mm.Mechanism(1.0, 0.1), mm.Ledger(unproved=("a rule",)).add(mm.Mechanism(1.0, 0.1), 3)
    for ask in (lambda *a, **k: epsilon(*a, 1e-5, **k), lambda *a, **k: delta(*a, 1.0, **k), renyi_curve):
        with pytest.raises(mm.ModelMixError, match="neither a Mechanism nor a Ledger"):
            ask("a mechanism")
        with pytest.raises(mm.ModelMixError, match="leave steps out"):
            ask(mm.Ledger().add(mechanism, 3), steps=3)
        with pytest.raises(mm.ModelMixError, match="for how many steps"):
            ask(mechanism)
        with pytest.raises(mm.UnprovedError, match="a rule"):
            ask(broken)
    for wrong in ([], [1.0], [0.5, 3.0], [math.nan]):
        with pytest.raises(mm.ModelMixError, match="greater than 1"):
            rdp(mechanism, wrong)
    with pytest.raises(mm.ModelMixError, match="up to 131072"):
        rdp(mechanism, [2.0, 131073.0])


def test_no_step_costs_nothing():
    found = guarantee(mm.Ledger(), 1e-5)
    assert (found.epsilon, found.order, found.delta) == (0.0, 0.0, 1e-5)
    assert delta(mm.Ledger(), 0.0) == 0


@pytest.mark.parametrize("mechanism", [mm.Mechanism(1.0, 1.0), mm.Mechanism(2.0, 0.2), mm.Mechanism(0.7, 0.3, 2.0, 4)])
def test_divergences_are_the_curve_over_its_order(mechanism):
    kappa, orders = step_curve(mechanism, 0), orders_at(0)
    np.testing.assert_allclose(rdp(mechanism, orders), kappa / (orders - 1), rtol=1e-12)
    between = rdp(mechanism, [1.5, 2.5])
    np.testing.assert_allclose(between, [0.5 * kappa[0] / 0.5, (kappa[0] + kappa[1]) / 2 / 1.5], rtol=1e-12)
    np.testing.assert_allclose(rdp(mechanism, [64.0]), rdp(mechanism, [64.0, 65.0])[:1], rtol=1e-12)
    if mechanism.sample_rate == 1:
        np.testing.assert_allclose(rdp(mechanism, [200.0]), 100.0, rtol=1e-9)  # alpha/2 for z = 1


def test_a_guarantee_says_what_proves_it():
    """The order that is named gives the epsilon that is named, and no other order a smaller one."""
    mechanism = mm.Mechanism(1.1, 0.05, 2.0)
    for conversion in ("classic", "improved"):
        found = guarantee(mechanism, 1e-5, steps=300, conversion=conversion)
        orders, kappa = renyi_curve(mechanism, 300, 1)
        if conversion == "improved":
            orders, kappa = refine(orders, kappa)
        values = epsilons(orders, kappa, 1e-5, conversion)
        assert found.epsilon == pytest.approx(values.min(), rel=1e-9)
        assert found.epsilon >= values.min(), "rounded up"
        assert found.order == orders[np.argmin(values)]
        assert found.reason is None
        assert (found.delta, found.conversion) == (1e-5, conversion)
        proved = delta(mechanism, found.epsilon, steps=300, conversion=conversion)
        assert proved == pytest.approx(1e-5, rel=1e-6) or (conversion == "classic" and proved < 1e-5)


@pytest.mark.parametrize("z", [2.0, 40.0, 400.0, 5e3, 2e4])
def test_the_grid_grows_until_the_best_order_is_inside(z):
    """Unsampled Gaussian steps: the classic conversion is best at 1 + z sqrt(2 log(1/delta)/T), in closed form."""
    mechanism, at = mm.Mechanism(z, 1.0), 1e-5
    for steps in (1, 4):
        best = steps / (2 * z**2) + math.sqrt(2 * steps * math.log(1 / at)) / z
        found = guarantee(mechanism, at, steps=steps, conversion="classic")
        assert best * (1 - 1e-9) <= found.epsilon <= best * (1 + 1e-3 + 0.2 / z)
        assert found.order == pytest.approx(1 + z * math.sqrt(2 * math.log(1 / at) / steps), rel=0.03, abs=1)
        assert found.reason is None
        assert epsilon_curve(mechanism, [steps], at, conversion="classic")[0] == pytest.approx(found.epsilon, rel=1e-12)
        for conversion in ("classic", "improved"):
            value = epsilon(mechanism, at, steps=steps, conversion=conversion)
            assert epsilon_curve(mechanism, [7, steps], at, conversion=conversion)[1] == pytest.approx(value, rel=1e-12)
            if value > 0:
                back = delta(mechanism, value, steps=steps, conversion=conversion)
                assert 0.98 * at <= back <= at * (1 + 1e-6)
    far = guarantee(mm.Mechanism(1e6, 1.0), at, steps=1, conversion="classic")
    assert "could lower epsilon by at most" in str(far.reason)
    assert far.order == orders_at(4)[-1]


@pytest.mark.parametrize(("z", "q", "steps", "at"), [(5.0, 1.0, 10, 0.3), (5.0, 0.5, 31, 0.3), (5.0, 0.5, 1000, 1e-5)])
def test_quarter_orders_serve_the_improved_conversion_alone(z, q, steps, at, monkeypatch):
    """Where the best orders are low, one between whole numbers proves the smaller epsilon; by straight lines alone."""
    monkeypatch.setattr(accountant, "real_curve", lambda mechanism: None)
    mechanism = mm.Mechanism(z, q)
    orders, kappa = renyi_curve(mechanism, steps)
    for conversion, between in (("improved", True), ("classic", False)):
        found = guarantee(mechanism, at, steps=steps, conversion=conversion)
        whole_orders = float(np.min(epsilons(orders, kappa, at, conversion)))
        fine = float(np.min(epsilons(*refine(orders, kappa), at, conversion)))
        assert found.epsilon == pytest.approx(fine if between else whole_orders, rel=1e-12)
        assert (found.order != round(found.order)) == between
        assert (found.epsilon < whole_orders * (1 - 1e-6)) == between
        assert epsilon_curve(mechanism, [steps], at, conversion=conversion)[0] == pytest.approx(
            found.epsilon, rel=1e-12
        )


def test_answers_are_rounded_up_and_ends_are_named(monkeypatch):
    monkeypatch.setattr(accountant, "real_curve", lambda mechanism: None)
    mechanism = mm.Mechanism(1.0, 1.0)
    orders, kappa = refine(*renyi_curve(mechanism, 5))
    smallest = float(np.min(epsilons(orders, kappa, 1e-5, "improved")))
    assert smallest < epsilon(mechanism, 1e-5, steps=5) < smallest * (1 + 1e-12)
    assert smallest < epsilon_curve(mechanism, [5], 1e-5)[0] < smallest * (1 + 1e-12)
    proved = math.exp(float(np.min(log_deltas(orders, kappa, 3.0, "improved"))))
    assert proved < delta(mechanism, 3.0, steps=5) < proved * (1 + 1e-12)
    nothing = guarantee(mm.Mechanism(1e-200, 1.0), 1e-5, steps=1)
    assert (nothing.delta, nothing.order) == (1e-5, 0.0)
    pure_one = guarantee(mm.Mechanism(1.0, 1.0, law="laplace"), 1e-300, steps=1)
    assert (pure_one.delta, pure_one.order) == (1e-300, math.inf)
    assert "pure" in str(pure_one.reason)
    assert delta(mm.Mechanism(1.0, 1.0, law="laplace"), pure_one.epsilon, steps=1) == 0
    for bad in (0.0, 1.0, -1.0):
        with pytest.raises(mm.ModelMixError, match="delta"):
            epsilon_curve(mechanism, [1], bad)


def test_a_mechanism_mixes_as_soon_as_its_width_is_above_zero():
    for omega in (1e-9, 0.5, 1.0, 7.0):
        mechanism = mm.Mechanism(1.0, 0.1, omega)
        assert mechanism.mixed
        assert mechanism.coordinate_law == mm.Mixed(mm.Gaussian(1.0), omega)
    assert not mm.Mechanism(1.0, 0.1).mixed
    assert mm.Mechanism(1.0, 0.1).coordinate_law == mm.Gaussian(1.0)


def test_epsilon_zero_is_proved_by_total_variation():
    mechanism = mm.Mechanism(1e5, 1e-3)
    found = guarantee(mechanism, 1e-3, steps=1)
    assert found.epsilon == 0
    assert "total variation" in str(found.reason)
    d = rdp(mechanism, [1.25])[0]
    assert delta(mechanism, 0.0, steps=1) == pytest.approx(math.sqrt(-math.expm1(-d)), rel=1e-6)
    assert delta(mechanism, 0.0, steps=1, conversion="classic") == 1


# Laplace noise: pure privacy.


def pure(z: float, q: float) -> float:
    """epsilon with delta = 0 of one step whose gradient uses up the l1 clip."""
    return math.log1p(q * math.expm1(1 / z))


@given(z=st.floats(0.05, 20), q=st.floats(1e-4, 1), p=st.integers(1, 400), omega=st.sampled_from([0.0, 2.0]))
def test_the_worst_loss_uses_the_whole_clip_whatever_the_truncation(z, q, p, omega):
    """Full coordinates of c/sqrt(p) and one with the rest have an l1 norm of c, and mixing keeps the largest ratio."""
    assert worst_loss(mm.Mechanism(z, q, omega, p, "laplace")) == pytest.approx(pure(z, q), rel=1e-9)
    assert worst_loss(mm.Mechanism(z, q, omega, p)) == math.inf


@given(p=st.integers(1, 400), d=st.integers(1, 30), z=st.floats(0.1, 10))
def test_the_worst_loss_of_few_coordinates(p, d, z):
    used = min(1.0, d / math.sqrt(p))
    assert worst_loss(mm.Mechanism(z, 1.0, 0.0, p, "laplace", d)) == pytest.approx(used / z, rel=1e-9)


def test_the_worst_loss_of_phases_adds_up():
    """At a delta that no moment helps with, epsilon is the sum over all steps of all phases."""
    steps = ((0.5, 0.1, 3), (2.0, 1.0, 5), (1.0, 0.3, 2))
    ledger = mm.Ledger()
    for z, q, count in steps:
        ledger = ledger.add(mm.Mechanism(z, q, law="laplace"), count)
    total = sum(count * pure(z, q) for z, q, count in steps)
    found = guarantee(ledger, 1e-300)
    assert found.order == math.inf
    assert found.epsilon == pytest.approx(total, rel=1e-9)
    assert delta(ledger, total * (1 + 1e-9)) == 0
    assert 0 < delta(ledger, total * 0.9) < 1
    assert epsilon(ledger.add(mm.Mechanism(1.0, 0.1), 1), 1e-300) > 2 * total, "Gaussian noise has no worst case"


@pytest.mark.parametrize("at", [1e-5, 1e-40, 1e-300])
@pytest.mark.parametrize(
    "mechanism", [mm.Mechanism(0.5, 0.1, 0.0, 7, "laplace"), mm.Mechanism(2.0, 1.0, 3.0, law="laplace")]
)
def test_a_curve_of_laplace_noise_is_the_single_answers(mechanism, at):
    steps = [1, 2, 5, 40, 1000]
    singles = [epsilon(mechanism, at, steps=t) for t in steps]
    np.testing.assert_allclose(epsilon_curve(mechanism, steps, at), singles, rtol=1e-12)
    assert singles[0] <= worst_loss(mechanism) * (1 + 1e-12)
    if at == 1e-300:
        np.testing.assert_allclose(singles[:4], np.array(steps[:4]) * worst_loss(mechanism), rtol=1e-12)


# The l2 norm of what clipping leaves.


def greedy(norm: int, p: int, d: int) -> np.ndarray:
    """The longest clipped gradient, built coordinate by coordinate: as much as bound and budget leave."""
    bound, left, found = 1 / math.sqrt(p), 1.0, []
    for _ in range(d):
        size = min(bound, left if norm == 1 else math.sqrt(max(0.0, left)))
        found.append(size)
        left -= size if norm == 1 else size**2
        if left < 1e-12:
            break
    return np.array(found)


@given(p=st.integers(1, 120), d=st.one_of(st.none(), st.integers(1, 150)), law=st.sampled_from(["gaussian", "laplace"]))
def test_l2_sensitivity_is_the_norm_of_the_longest_clipped_gradient(p, d, law):
    mechanism = mm.Mechanism(1.0, 0.1, 0.0, p, law, d)
    longest = greedy(mechanism.coordinate_law.norm, p, 10**4 if d is None else d)
    assert mechanism.l2_sensitivity == pytest.approx(np.linalg.norm(longest), rel=1e-9)
    flat = np.repeat([size for size, _ in mechanism.worst_gradient], [count for _, count in mechanism.worst_gradient])
    np.testing.assert_allclose(flat, longest, rtol=1e-6, atol=1e-9)
    if law == "gaussian":
        pair = mm.EmbeddingMechanism(1.0, 0.1, 0.0, p, dimension=d)
        assert pair.l2_sensitivity == pytest.approx(math.hypot(1.0, np.linalg.norm(longest)), rel=1e-9)


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
def test_l2_sensitivity_of_small_cases(law):
    for p in range(1, 20):
        for d in (None, 1, 2, 3, 4, 5, 19, 20, 100):
            mechanism = mm.Mechanism(1.0, 0.1, 0.0, p, law, d)
            longest = np.linalg.norm(greedy(mechanism.coordinate_law.norm, p, 10**4 if d is None else d))
            assert mechanism.l2_sensitivity == pytest.approx(longest, rel=1e-12)
            assert mechanism.equal_variance_multiplier == pytest.approx(mechanism.total_std / longest, rel=1e-12)


@given(
    seed=st.integers(0, 10**6), p=st.integers(1, 30), d=st.integers(1, 40), law=st.sampled_from(["gaussian", "laplace"])
)
def test_no_clipped_gradient_is_longer_than_the_sensitivity(seed, p, d, law):
    rng = np.random.default_rng(seed)
    mechanism = mm.Mechanism(1.0, 0.1, 0.0, p, law, d)
    norm = mechanism.coordinate_law.norm
    g = rng.standard_normal(d) * rng.exponential(1.0, d) ** 3
    g = np.clip(g / max(1e-300, np.linalg.norm(g, norm)), -mechanism.coordinate_bound, mechanism.coordinate_bound)
    assert np.linalg.norm(g) <= mechanism.l2_sensitivity * (1 + 1e-12)


@given(z=st.floats(0.3, 5), q=st.floats(0.01, 1), p=st.integers(1, 50), d=st.integers(1, 60))
@settings(max_examples=30)
def test_without_mixing_only_the_l2_norm_counts(z, q, p, d):
    """Rotation invariance of the Gaussian: many coordinates, or one as long as all of them."""
    for kind in (mm.Mechanism, mm.EmbeddingMechanism):
        mechanism = kind(z, q, 0.0, p, dimension=d)
        one = mm.Mechanism(z / mechanism.l2_sensitivity, q)
        np.testing.assert_allclose(step_curve(mechanism, 0), step_curve(one, 0), rtol=1e-9)


# Moments that are not finite prove nothing.


@pytest.mark.parametrize("bad", [math.inf, math.nan, -math.inf])
@pytest.mark.parametrize("q", [1.0, 0.3])
def test_an_order_without_a_moment_proves_nothing(bad, q):
    """kappa is infinite wherever the sum needs a moment that is not known, and untouched below."""
    orders = orders_at(1)
    log_a = 0.1 * orders * (orders - 1)
    whole = sampled_curve(log_a, q, 1)
    cut = np.where(orders > 10, bad, log_a)
    found = sampled_curve(cut, q, 1)
    assert np.all(np.isposinf(found[orders > 10]))
    np.testing.assert_array_equal(found[orders <= 10], whole[orders <= 10])
    assert np.all(np.isposinf(sampled_curve(np.full_like(orders, bad), q, 1)))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("q", [1.0, 0.3])
def test_a_step_with_a_broken_moment_is_not_cheaper(bad, q, monkeypatch):
    """One of two bounds breaks down, or both do: the other one counts, or nothing does; NaN never does."""
    mechanism = mm.EmbeddingMechanism(1.0, q, 40.0, 25)
    pair, whole = mechanism.moment_bounds
    orders, honest = orders_at(0), log_moments

    def curve(broken):
        def moments(law, shift, k):
            found = honest(law, shift, k)
            return np.where(k > 8, bad, found) if (law, shift) in broken else found

        monkeypatch.setattr(renyi, "log_moments", moments)
        return renyi._step_curve(mechanism, 0)

    def alone(parts):
        return sampled_curve(sum(count * honest(law, shift, orders) for law, shift, count in parts), q, 0)

    gaussian, rest = (pair[0][0], pair[0][1]), (whole[0][0], whole[0][1])
    high = orders > 8
    assert np.all(np.isposinf(curve({gaussian, rest})[high]))
    assert np.all(np.isfinite(curve({gaussian, rest})[~high]))
    only_whole = curve({gaussian})
    assert not np.any(np.isnan(only_whole))
    assert np.all(only_whole[~high] <= np.minimum(alone(pair), alone(whole))[~high] * (1 + 1e-12))
    assert np.all(only_whole[high] >= np.minimum(alone(pair), alone(whole))[high] * (1 - 1e-12))
    if q == 1:
        np.testing.assert_allclose(only_whole[high], alone(whole)[high], rtol=1e-12)


def test_noise_too_small_for_any_moment_has_no_epsilon():
    for mechanism in (mm.Mechanism(1e-200, 0.5), mm.Mechanism(1e-200, 0.5, 1.0), mm.Mechanism(1e-200, 1.0)):
        found = guarantee(mechanism, 1e-5, steps=1)
        assert found.epsilon == math.inf
        assert "too small" in str(found.reason)
        assert epsilon_curve(mechanism, [1, 2], 1e-5).tolist() == [math.inf, math.inf]
        assert delta(mechanism, 1.0, steps=1) == 1
    one_sided = mm.Ledger().add(mm.Mechanism(1.0, 0.5), 5).add(mm.Mechanism(1e-200, 0.5), 1)
    assert epsilon(one_sided, 1e-5) == math.inf, "one bad phase spoils them all"


# Privacy-loss distributions that lost mass.


class Spoiled:
    """A distribution of the library whose delta at very low epsilon, its whole mass, is something else."""

    def __init__(self, inside, mass):
        self.inside, self.mass = inside, mass

    def self_compose(self, count):
        return Spoiled(self.inside.self_compose(count), self.mass)

    def compose(self, other):
        return Spoiled(self.inside.compose(other.inside), self.mass)

    def get_delta_for_epsilon(self, at):
        found = self.inside.get_delta_for_epsilon(at)
        return self.mass if at < -50 else found

    def get_epsilon_for_delta(self, at):
        return self.inside.get_epsilon_for_delta(at)


@pytest.mark.parametrize(
    ("mass", "used"),
    [
        (1.0, True), (1 - 0.5e-2 * 1e-5, True), (1.0005, True),
        (1 - 2e-2 * 1e-5, False), (1.002, False), (0.5, False), (2.0, False), (math.nan, False),
    ],
)  # fmt: skip
def test_a_distribution_that_lost_or_won_mass_is_not_used(mass, used, monkeypatch):
    """Lost mass lowers delta. A hundredth of delta may be missing, and a thousandth too much only raises it."""
    from dp_accounting.pld import privacy_loss_distribution

    honest = privacy_loss_distribution.from_gaussian_mechanism
    monkeypatch.setattr(
        privacy_loss_distribution, "from_gaussian_mechanism", lambda *a, **how: Spoiled(honest(*a, **how), mass)
    )
    pld._cached_epsilon.cache_clear()
    ledger = mm.Ledger().add(mm.Mechanism(0.71, 0.113), 12).add(mm.Mechanism(1.1, 0.07), 5)
    try:
        found = pld_epsilon(ledger, 1e-5)
        best = mm.guarantee(ledger, 1e-5)
    finally:
        pld._cached_epsilon.cache_clear()
    assert math.isfinite(found) == used
    assert best.epsilon == pytest.approx(found if used else epsilon(ledger, 1e-5), rel=1e-12)
