"""Privacy-loss distributions without the library that makes them: what it is asked, and what is made of its answers."""

from __future__ import annotations

import math
import sys
import types

import mpmath as mp
import numpy as np
import pytest

import modelmix as mm
from modelmix.accounting import pld

NOISE = 1e-11
ONE, TWO = mm.Mechanism(1.0, 0.1), mm.Mechanism(2.0, 0.2)
LEDGER = mm.Ledger().add(ONE, 30).add(TWO, 5).add(ONE, 10)


@pytest.fixture(autouse=True)
def nothing_is_remembered():
    pld._cached_epsilon.cache_clear()
    pld.pld_delta.cache_clear()
    yield
    pld._cached_epsilon.cache_clear()
    pld.pld_delta.cache_clear()


# What is asked of a composed distribution.


@pytest.fixture
def asked(monkeypatch):
    """Answers instead of ``_asked``; the questions are put to a distribution with delta(e) = exp(-e)/100."""

    class Total:
        def get_epsilon_for_delta(self, delta):
            return said["epsilon"](delta)

        def get_delta_for_epsilon(self, epsilon):
            return said["delta"](epsilon)

    def ask(ledger, rough, delta, question, spread=0.0, resolution=pld._RESOLUTION):
        calls.append((ledger, rough, delta, spread, resolution))
        return question(Total())

    calls = []
    said = {
        "epsilon": lambda delta: 3.0,
        "delta": lambda epsilon: math.exp(-epsilon) / 100,
        "renyi": 4.0,
        "calls": calls,
    }

    def renyi(ledger, delta):
        said["asked delta"] = delta
        return said["renyi"]

    monkeypatch.setattr(pld, "_asked", ask)
    monkeypatch.setattr(pld, "renyi_epsilon", renyi)
    return said


PUT_TOGETHER = mm.Ledger().add(ONE, 40).add(TWO, 5)


def test_equal_mechanisms_are_put_together_and_claims_forgotten(asked):
    assert pld.pld_epsilon(LEDGER, 1e-5) == 3
    claimed = mm.Ledger(LEDGER.phases, population=50, unit="person", seeded=True)
    assert pld.pld_epsilon(claimed, 1e-5) == 3
    ((ledger, rough, delta, spread, resolution),) = asked["calls"]
    assert (ledger, rough, spread, resolution) == (PUT_TOGETHER, 4.0, 0.0, 2e4)
    assert delta == asked["asked delta"] == 1e-5 - 3 * NOISE, (
        "the noise of the transforms: of the ledger and two phases"
    )
    pld.pld_epsilon(LEDGER, 1e-5, 100.0)
    assert asked["calls"][-1][-1] == 100


@pytest.mark.parametrize(
    "mechanism",
    [
        mm.Mechanism(1.0, 0.1, 2.0),
        mm.Mechanism(1.0, 0.1, law="laplace"),
        mm.EmbeddingMechanism(1.0, 0.1),
        mm.Mechanism(1.0, 0.1, law=lambda z: mm.Gaussian(z)),
    ],
)
def test_other_mechanisms_are_refused(asked, mechanism):
    for ask in (pld.pld_epsilon, pld.pld_delta, pld.pld_group_epsilon):
        with pytest.raises(mm.UnprovedError, match="plain Gaussian DP-SGD only"):
            ask(LEDGER.add(mechanism), 1e-3)
        with pytest.raises(mm.UnprovedError, match="a rule"):
            ask(mm.Ledger(LEDGER.phases, ("a rule",)), 1e-3)
    assert not asked["calls"]


def test_epsilon_looks_twice_where_the_first_guess_was_far_off(asked):
    answers = [1.9, 0.96]
    asked["epsilon"] = lambda delta: answers.pop(0)
    assert pld.pld_epsilon(LEDGER, 1e-5) == 0.96
    assert [call[1] for call in asked["calls"]] == [4.0, 1.9]
    for first in (2.1, 0.0, 5.0):
        pld._cached_epsilon.cache_clear()
        asked["calls"].clear()
        answers[:] = [first]
        assert pld.pld_epsilon(LEDGER, 1e-5) == first
        assert len(asked["calls"]) == 1
    pld._cached_epsilon.cache_clear()
    answers[:] = [2.0, 1.5]
    assert pld.pld_epsilon(LEDGER, 1e-5) == 1.5, "half is far off"


def test_the_ends_of_epsilon(asked):
    assert pld.pld_epsilon(mm.Ledger(), 1e-5) == 0
    asked["renyi"] = 0.0
    assert pld.pld_epsilon(LEDGER, 1e-5) == 0
    asked["renyi"] = math.inf
    assert pld.pld_epsilon(LEDGER, 1e-6) == math.inf
    asked["renyi"] = 4.0
    for delta in (3 * NOISE, 2 * NOISE):
        assert pld.pld_epsilon(LEDGER, delta) == math.inf
    assert not asked["calls"]
    assert pld.pld_epsilon(LEDGER, 3.5 * NOISE) == 3
    for delta in (0, 1, None):
        with pytest.raises(mm.ModelMixError):
            pld.pld_epsilon(LEDGER, delta)


def test_delta_pays_for_the_noise_of_the_transforms_and_for_lost_mass(asked):
    assert pld.pld_delta(LEDGER, 2.0) == math.exp(-2.0) / 100 + 6 * NOISE
    assert asked["calls"] == [(PUT_TOGETHER, 2.0, 3 * NOISE, 4.0, 2e4)]
    assert asked["asked delta"] == 1e-3
    assert pld.pld_delta(LEDGER, 0.0) == 0.01 + 6 * NOISE
    assert asked["calls"][-1][1] == 4.0, "buckets for an epsilon of nothing are those of the spread"
    asked["renyi"] = 0.0
    pld.pld_delta(LEDGER.add(TWO), 0.0)
    assert asked["calls"][-1][1] == 1.0
    assert pld.pld_delta(mm.Ledger(), 2.0) == 0
    asked["calls"].clear()
    asked["renyi"] = math.inf
    assert pld.pld_delta(LEDGER, 3.0) == math.inf
    assert not asked["calls"]
    with pytest.raises(mm.ModelMixError, match="0 or more"):
        pld.pld_delta(LEDGER, -1.0)


def test_the_group_of_two_by_distributions(asked):
    """With delta(e) = C/e/(1 + exp(e)), the least e with (1 + exp(e)) delta(e) <= target is C/target."""
    for c in (1.0, 5.0, 15.9):
        asked["delta"] = lambda e, c=c: c / max(e, 1e-9) / (1 + math.exp(e)) - 9 * NOISE
        found = pld.pld_group_epsilon(LEDGER, 1.0)
        assert c * (1 - 1e-7) <= found <= c * (1 + 1.1e-4)
        assert asked["calls"][-1] == (PUT_TOGETHER, 4.0, 9 * NOISE, 0.0, 2e4)
        assert asked["asked delta"] == 0.1
    asked["delta"] = lambda e: 16.1 / max(e, 1e-9) / (1 + math.exp(e))
    assert pld.pld_group_epsilon(LEDGER, 1.0) == math.inf, "nothing is looked for past four times the moments'"
    asked["delta"] = lambda e: math.nan
    assert pld.pld_group_epsilon(LEDGER, 1.0) == math.inf
    asked.update(renyi=0.5, delta=lambda e: 0.2 / (1 + math.exp(e)))
    assert pld.pld_group_epsilon(LEDGER, 1.0) < 1e-3, "a small epsilon is asked for as well"
    asked["calls"].clear()
    for renyi in (0.0, math.inf):
        asked["renyi"] = renyi
        assert pld.pld_group_epsilon(LEDGER, 1.0) == renyi
    asked["renyi"] = 100.0
    assert pld.pld_group_epsilon(LEDGER, 1.0) == math.inf
    asked["renyi"] = 0.0
    assert pld.pld_group_epsilon(mm.Ledger(), 1.0) == 0
    assert not asked["calls"]


def test_the_noise_of_the_transforms_counts_for_a_group(asked):
    asked["delta"] = lambda e: 0.0
    limit = math.log(1e-3 / (9 * NOISE) - 1)
    asked["renyi"] = 20.0
    assert pld.pld_group_epsilon(LEDGER, 1e-3) == math.inf, "at e = 80 its noise alone is more than delta"
    asked["renyi"] = limit / 4 * 0.999
    assert pld.pld_group_epsilon(LEDGER, 1e-3) < 1e-3


# One step in closed form.


@pytest.mark.parametrize(("z", "q"), [(0.3, 0.03), (1.0, 0.01), (5.0, 0.5), (1.0, 1.0), (40.0, 0.2)])
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 2.0, 9.0])
def test_delta_of_one_step_to_forty_digits(z, q, epsilon):
    """sup over sets: the integral of (1-q) N(0) + q N(1) - exp(epsilon) N(0) where it is positive."""
    with mp.workdps(40):
        e, s = mp.e ** mp.mpf(epsilon), mp.mpf(z)
        edge = s**2 * mp.log(1 + (e - 1) / mp.mpf(q)) + mp.mpf(1) / 2
        above0, above1 = (mp.ncdf((m - edge) / s) for m in (0, 1))
        truth = float((1 - mp.mpf(q) - e) * above0 + mp.mpf(q) * above1)
    assert pld.one_step_delta(mm.Mechanism(z, q), epsilon) == pytest.approx(truth, rel=1e-9, abs=1e-17)


def test_delta_of_one_step_at_enormous_epsilon():
    """Where exp overflows the 1 in log(1 + (exp(e) - 1)/q) does not count; both sides of the change agree."""
    loud = mm.Mechanism(0.01, 0.1)
    for mechanism in (loud, mm.Mechanism(0.0289, 0.1)):
        below, above = (pld.one_step_delta(mechanism, e) for e in (599.999999, 600.000001))
        assert below == pytest.approx(above, rel=1e-6)
    assert pld.one_step_delta(loud, 1000.0) == pytest.approx(0.1, rel=1e-6)
    assert pld.one_step_delta(loud, 1e5) == 0


# The library.


class Fake:
    """A distribution that remembers how it was made."""

    mass = 1.0
    answer = 0.5

    def __init__(self, made):
        self.made = made

    def self_compose(self, times):
        return Fake([(*self.made[0][:-1], self.made[0][-1] * times)])

    def compose(self, other):
        return Fake(self.made + other.made)

    def get_delta_for_epsilon(self, epsilon):
        Fake.floor = epsilon
        return Fake.mass


@pytest.fixture
def library(monkeypatch):
    def make(z, sampling_prob, value_discretization_interval):
        return Fake([(z, sampling_prob, value_discretization_interval, 1)])

    package, module = types.ModuleType("dp_accounting.pld"), types.ModuleType("privacy_loss_distribution")
    module.from_gaussian_mechanism = make
    package.privacy_loss_distribution = module
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", package)
    monkeypatch.setattr(Fake, "mass", 1.0)
    return module


def made(ledger, rough, delta=1e-5, **more):
    out = []
    found = pld._asked(ledger, rough, delta, lambda total: out.append(total.made) or 7.0, **more)
    return found, out[0] if out else None


def test_every_phase_is_made_with_its_own_numbers(library):
    found, phases = made(PUT_TOGETHER, 4.0)
    assert found == 7
    interval = phases[0][2]
    assert phases == [(1.0, 0.1, interval, 40), (2.0, 0.2, interval, 5)]
    assert Fake.floor == -140


def test_buckets_fit_the_question(library):
    def interval(ledger, rough, **more):
        found, phases = made(ledger, rough, **more)
        return phases[0][2] if found == 7 else None

    one = mm.Ledger().add(mm.Mechanism(1.0, 1e-3), 1)
    span = pld._step_span(mm.Mechanism(1.0, 1e-3))
    assert interval(one, 8.0) == pytest.approx(8.0 / 2e4)
    assert interval(one, 8.0, resolution=2e3) == pytest.approx(8.0 / 2e3)
    many = mm.Ledger().add(mm.Mechanism(1.0, 1e-3), 10**6)
    assert interval(many, 2.0) == pytest.approx(2.0 / 2e4)
    steps = mm.Ledger().add(mm.Mechanism(1.0, 1e-3), 25 * 10**6)
    assert interval(steps, 20.0, resolution=1e3) == pytest.approx(max(math.sqrt(0.008 * 20 / 25e6), span / 4e4))
    assert interval(one, 0.01) == pytest.approx(span / 4e4), "the loss of one step fits into 40,000 buckets"
    both = one.add(mm.Mechanism(0.5, 0.1), 1)
    assert interval(both, 0.01) == pytest.approx(pld._step_span(mm.Mechanism(0.5, 0.1)) / 4e4)
    assert interval(one, 1.0, spread=400.0) == pytest.approx(400 / 4e5)
    assert interval(one, 2e4) == 0.5
    quiet = mm.Ledger().add(mm.Mechanism(1e4, 1e-3), 1)
    assert interval(quiet, 0.021) == pytest.approx(0.021 / 2e4)
    assert interval(quiet, 0.0199) is None, "probabilities of buckets below 1e-6 are rounding errors"
    # No more than two million buckets, each at most one half wide.
    assert interval(one, 0.999e6) == 0.5
    assert interval(one, 1.001e6) is None
    assert interval(one, 1.0, spread=0.999e6) == 0.5
    assert interval(one, 1.0, spread=1.001e6) is None
    loud = mm.Ledger().add(mm.Mechanism(1e-3, 1.0), 1)
    assert interval(loud, 1.0) == 0.5
    assert interval(mm.Ledger().add(mm.Mechanism(7e-4, 1.0), 1), 1.0) is None


@pytest.mark.parametrize(
    ("mass", "whole"),
    [
        (1.0, True),
        (1 - 0.9e-7, True),
        (1 - 1.1e-7, False),
        (1.0009, True),
        (1.0011, False),
        (math.nan, False),
    ],
)
def test_mass_that_is_lost_or_won_is_a_breakdown(library, monkeypatch, mass, whole):
    monkeypatch.setattr(Fake, "mass", mass)
    assert pld._asked(PUT_TOGETHER, 4.0, 1e-5, lambda total: 7.0) == (7.0 if whole else math.inf)


@pytest.mark.parametrize("error", [FloatingPointError, ZeroDivisionError, OverflowError, IndexError])
def test_a_library_that_breaks_down_proves_nothing(library, error):
    def question(total):
        raise error

    assert pld._asked(PUT_TOGETHER, 4.0, 1e-5, question) == math.inf
    with pytest.raises(KeyError):
        pld._asked(PUT_TOGETHER, 4.0, 1e-5, lambda total: {}["bug"])


@pytest.mark.parametrize("numbers", [(1e308, 1e308), (np.inf, -np.inf)])
def test_overflow_in_the_library_is_a_breakdown(library, numbers):
    a, b = (np.array([x]) for x in numbers)
    assert pld._asked(PUT_TOGETHER, 4.0, 1e-5, lambda total: float((a + b)[0])) == math.inf
    assert pld._asked(PUT_TOGETHER, 4.0, 1e-5, lambda total: float((np.ones(1) / np.zeros(1))[0])) == math.inf


def test_without_the_library_the_renyi_value_stands(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    assert pld._asked(PUT_TOGETHER, 4.0, 1e-5, lambda total: 7.0) == math.inf


def test_the_span_of_a_loud_step():
    """Beyond 30 the 1 in log(1 + exp(loss)) is below rounding."""
    for z, q in ((0.5, 0.1), (0.26, 0.5), (1e-3, 0.5), (3.0, 1e-9)):
        with mp.workdps(40):
            loss = (mp.mpf(1) / 2 / mp.mpf(z) + 10) / mp.mpf(z) + mp.log(mp.mpf(q))
            truth = float(mp.log(1 + mp.e**loss))
        assert pld._step_span(mm.Mechanism(z, q)) == pytest.approx(truth, rel=1e-12)


@pytest.mark.parametrize("steps", [1, 9_999, 10_000, 10_001, 20_000, 25_003, 10**8 + 7])
def test_no_step_is_lost_in_stages(steps):
    assert sum(times for *_, times in pld._composed(Fake([(1.0, 0.1, 0.5, 1)]), steps).made) == steps


def test_stages_are_short():
    longest = []

    class Counted(Fake):
        def self_compose(self, times):
            longest.append(times)
            return Counted(super().self_compose(times).made)

        def compose(self, other):
            return Counted(super().compose(other).made)

    for steps in (10_000, 25_003, 10**8 + 7):
        pld._composed(Counted([(1.0, 0.1, 0.5, 1)]), steps)
    assert max(longest) == 10_000


# Ledgers that are mapped.


def test_half_the_noise_and_width_without_sampling_bounds_replacing():
    ledger = mm.Ledger(population=50, unit="person").add(mm.Mechanism(4.0, 0.1, 3.0, 25, "laplace", 12), 4).add(ONE, 2)
    wanted = mm.Ledger(population=50, unit="person").add(mm.Mechanism(2.0, 1.0, 1.5, 25, "laplace", 12), 4)
    assert pld.halved(ledger) == wanted.add(mm.Mechanism(0.5, 1.0), 2)
    assert pld.halved(ledger.add(mm.Mechanism(1.0, 0.1, law=lambda z: mm.Gaussian(z)))) is None


def test_without_mixing_the_noise_stays_and_gradients_are_as_long_as_they_were():
    ledger = mm.Ledger(unproved=("a rule",), population=50)
    ledger = ledger.add(mm.Mechanism(1.0, 0.1, 3.0, 100, dimension=25), 4)
    ledger = ledger.add(mm.EmbeddingMechanism(2.0, 0.1, 3.0), 5).add(mm.Mechanism(1.0, 0.2, 3.0, 5, "laplace"), 6)
    plain = pld.unmixed(ledger)
    assert [(p.mechanism.law, p.mechanism.mixed, p.steps) for p in plain.phases] == [
        ("gaussian", False, 4), ("gaussian", False, 5), ("laplace", False, 6),
    ]  # fmt: skip
    assert [p.mechanism.noise_multiplier for p in plain.phases] == pytest.approx([2.0, math.sqrt(2), 1.0])
    assert [p.mechanism.sample_rate for p in plain.phases] == [0.1, 0.1, 0.2]
    assert plain.phases[2].mechanism == mm.Mechanism(1.0, 0.2, 0.0, 5, "laplace")
    assert (plain.unproved, plain.population) == (("a rule",), 50)


def test_the_yardstick_of_every_phase_has_its_variance():
    twin = pld.equal_variance(mm.Ledger().add(mm.Mechanism(1.0, 0.1, 3.0), 4).add(TWO, 5))
    assert [phase.mechanism.noise_multiplier for phase in twin.phases] == pytest.approx([math.sqrt(1.75), 2.0])
    assert [phase.steps for phase in twin.phases] == [4, 5]
