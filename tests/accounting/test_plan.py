"""A plan: what it refuses, which step has which mechanism, and what stays the same when it is changed."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

import modelmix as mm
from modelmix.accounting import plan as module
from modelmix.accounting.ledger import Phase
from modelmix.accounting.plan import calibrated_noise, plan_for_loop

A, B = mm.Mechanism(1.0, 0.1), mm.Mechanism(2.0, 0.2, 1.0)
TWO = (Phase(A, 3), Phase(B, 2))
EARLIER = mm.Ledger(population=500).add(mm.Mechanism(3.0, 0.5), 4)


@pytest.fixture
def costs(monkeypatch):
    """Epsilon of a ledger without an accountant: its steps, and a list of who was asked."""
    asked = []

    def cost(ledger, delta, *, by="best"):
        asked.append((ledger, delta, by))
        return float(ledger.steps)

    monkeypatch.setattr(module, "epsilon", cost)
    return asked


@pytest.fixture
def planned(monkeypatch):
    """Plans whose guarantee was asked for; one of more than 10 steps costs too much."""
    asked = []

    def cost(plan):
        asked.append(plan)
        if plan.steps > 10:
            raise mm.BudgetExceeded("this plan costs too much.")
        return plan.steps

    monkeypatch.setattr(module, "guarantee", cost)
    return asked


# What a plan is made of.


def test_a_plan_has_numbers_of_one_type_and_phases_in_a_tuple():
    plan = mm.Plan(list(TWO), np.float32(2**-10), 100, target=3)
    assert plan.phases == TWO
    assert type(plan.phases) is tuple
    assert (plan.delta, type(plan.delta)) == (2**-10, float)
    assert (plan.target, type(plan.target)) == (3.0, float)
    assert (plan.steps, plan.adjacency, plan.unit, plan.spent) == (5, "zero-out", "sample", mm.Ledger())
    assert hash(plan) == hash(mm.Plan(TWO, 2**-10, 100, target=3.0))
    assert (mm.Plan(TWO).delta, mm.Plan(TWO).target, mm.Plan(TWO).population) == (1e-5, None, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"phases": ()}, "at least one phase"),
        ({"phases": (Phase(A, 1), A)}, "at least one phase"),
        ({"phases": (A,)}, "at least one phase"),
        ({"delta": 0.0}, "strictly between 0 and 1"),
        ({"delta": "1e-5"}, "not a finite number"),
        ({"delta": 0.011}, "next to nothing"),
        ({"delta": 1e-2, "population": 100}, "below 1/100"),
        ({"target": 0.0}, "the target epsilon must be greater than 0"),
        ({"target": True}, "target epsilon"),
        ({"spent": "a ledger"}, "cannot read a ledger"),
        ({"spent": None}, "spent is the Ledger"),
        ({"population": 0}, "number of samples"),
        ({"adjacency": "replace-one", "population": 9}, "zero-out or add-or-remove"),
        ({"adjacency": "zero"}, "adjacency = 'zero' is unknown: choose one of zero-out, add-or-remove, replace-one"),
        ({"adjacency": "add-or-remove"}, "needs a population"),
        ({"unit": "a [red] one"}, "30 letters"),
    ],
)
def test_what_a_plan_refuses(change, message):
    with pytest.raises(mm.ModelMixError, match=message):
        mm.Plan(**{"phases": TWO, **change})


def test_a_plan_is_not_made_after_a_broken_rule():
    with pytest.raises(mm.UnprovedError, match="a rule"):
        mm.Plan(TWO, spent=mm.Ledger(unproved=("a rule",)).add(A))


def test_delta_is_below_one_over_every_population_that_counts():
    """Those of what was spent as well."""
    assert mm.Plan(TWO, 1e-2, 99).population == 99
    large = mm.Ledger(population=10**6).add(A)
    with pytest.raises(mm.ModelMixError, match="below 1/1000000"):
        mm.Plan(TWO, 1e-5, 100, spent=large)
    assert mm.Plan(TWO, 1e-7, 100, spent=large).ledger.populations == (100, 10**6)


# Plan.of.


def test_a_plan_of_a_mechanism_needs_its_steps():
    assert mm.Plan.of(A, 3, delta=1e-6, unit="person") == mm.Plan((Phase(A, 3),), 1e-6, unit="person")
    for source, steps, message in (
        (A, None, "for how many steps"),
        (mm.Ledger(TWO), 5, "a ledger knows its steps"),
        ("plain", 5, "neither a Mechanism nor a Ledger"),
        (None, 5, "neither a Mechanism nor a Ledger"),
        (mm.Ledger(), None, "at least one phase"),
    ):
        with pytest.raises(mm.ModelMixError, match=message):
            mm.Plan.of(source, steps)


def test_a_plan_of_a_ledger_takes_its_claim():
    ledger = mm.Ledger(TWO, adjacency="add-or-remove", unit="person", population=50)
    plan = mm.Plan.of(ledger)
    assert (plan.phases, plan.adjacency, plan.unit, plan.population) == (TWO, "add-or-remove", "person", 50)
    assert mm.Plan.of(ledger, population=50, unit="person", adjacency="add-or-remove") == plan
    assert mm.Plan.of(ledger, adjacency="zero-out").adjacency == "zero-out"
    unknown = mm.Ledger(TWO)
    assert mm.Plan.of(unknown, population=7).population == 7
    assert mm.Plan.of(unknown, target=2.0, delta=1e-3).target == 2.0


@pytest.mark.parametrize(
    ("ledger", "more", "message"),
    [
        (mm.Ledger(TWO, population=50), {"population": 60}, "cannot claim more"),
        (mm.Ledger(TWO, population=50), {"population": None}, "cannot claim more"),
        (mm.Ledger(TWO), {"unit": "person"}, "cannot claim more"),
        (mm.Ledger(TWO), {"unit": "person", "population": 7}, "cannot claim more"),
        (mm.Ledger(TWO), {"adjacency": "add-or-remove", "population": 50}, "cannot claim more"),
        (mm.Ledger(TWO, seeded=True), {}, "seeded"),
        (mm.Ledger(TWO, populations=(3, 4)), {}, "several populations"),
        (mm.Ledger(TWO, populations=(10**6,)), {}, "one that is not known for all of it"),
        (mm.Ledger(TWO, populations=(3,)), {"population": 7}, "one that is not known for all of it"),
        (mm.Ledger(TWO, unproved=("a rule",)), {}, "a rule"),
    ],
)
def test_a_plan_of_a_ledger_claims_no_more_than_it(ledger, more, message):
    with pytest.raises(mm.ModelMixError, match=message):
        mm.Plan.of(ledger, **more)


# Steps.


def test_every_step_has_the_mechanism_of_its_phase():
    plan = mm.Plan(TWO, population=100)
    assert [plan.mechanism_at(step) for step in range(1, 6)] == [A, A, A, B, B]
    assert [plan.expected_batch(step) for step in (3, 4)] == [10.0, 20.0]
    plan.require(5)
    for ask in (plan.require, plan.mechanism_at, plan.expected_batch):
        with pytest.raises(mm.BudgetExceeded, match="step 6 is past the end of a plan of 5 steps"):
            ask(6)
    with pytest.raises(mm.ModelMixError, match="not bound to a number of samples"):
        mm.Plan(TWO).expected_batch(1)


def test_what_is_left_after_some_steps():
    plan = mm.Plan(TWO, unit="person", population=100, adjacency="add-or-remove", spent=EARLIER_PEOPLE)
    claim = mm.Ledger(unit="person", population=100, adjacency="add-or-remove")
    for steps, left in (
        (0, TWO),
        (1, (Phase(A, 2), Phase(B, 2))),
        (3, (Phase(B, 2),)),
        (4, (Phase(B, 1),)),
        (5, ()),
        (9, ()),
    ):
        assert plan.after(steps) == replace(claim, phases=left)


EARLIER_PEOPLE = mm.Ledger(unit="person", population=100).add(A, 7)


def test_the_ledger_of_a_plan_is_what_was_spent_and_then_the_plan():
    plan = mm.Plan(TWO, 1e-3, 500, spent=EARLIER)
    assert plan.ledger == mm.Ledger((*EARLIER.phases, *TWO), population=500)
    assert plan.ledger is plan.ledger
    assert mm.Plan(TWO, spent=mm.Ledger().add(A, 4)).ledger.phases == (Phase(A, 7), Phase(B, 2))


# Longer and other plans.


def test_an_extended_plan_has_more_of_its_last_mechanism_and_no_target(planned):
    plan = mm.Plan(TWO, 1e-3, 500, target=2.0, spent=EARLIER)
    longer = plan.extended(4)
    assert longer == replace(plan, phases=(Phase(A, 3), Phase(B, 6)), target=None)
    assert plan.extended(1).steps == 6
    assert replace(plan, phases=(*TWO, Phase(A, 1))).extended(2).phases == (*TWO, Phase(A, 3))
    for steps in (0, -1, 1.5, None):
        with pytest.raises(mm.ModelMixError, match="the number of further steps"):
            plan.extended(steps)
    assert not planned


def test_other_phases_are_merged_and_held_to_the_target(planned):
    plan = mm.Plan(TWO, 1e-3, 500, target=2.0, spent=EARLIER)
    other = plan.with_phases([Phase(A, 2), Phase(A, 3), Phase(B, 1)])
    assert other == replace(plan, phases=(Phase(A, 5), Phase(B, 1)))
    assert planned == [other]
    with pytest.raises(mm.BudgetExceeded, match="too much"):
        plan.with_phases([Phase(A, 11)])
    free = replace(plan, target=None)
    assert free.with_phases([Phase(A, 11)]).steps == 11
    assert len(planned) == 2, "no target, nothing to ask for"
    assert plan.kept_to_target() is plan
    assert free.kept_to_target() is free


def test_a_plan_extends_what_it_begins_with_and_claims_alike(planned):
    plan = mm.Plan(TWO, 1e-3, 500, target=2.0, spent=EARLIER)
    assert plan.extends(plan)
    assert plan.extended(1).extends(plan)
    assert not plan.extends(plan.extended(1))
    assert plan.extends(replace(plan, target=None))
    assert plan.extends(replace(plan, phases=(Phase(A, 2),)))
    assert not plan.extends(replace(plan, phases=(Phase(B, 2),)))
    for change in (
        {"delta": 1e-4},
        {"population": 400},
        {"adjacency": "add-or-remove"},
        {"spent": EARLIER.add(A)},
    ):
        assert not plan.extended(1).extends(replace(plan, **change)), change
    person = replace(plan, unit="person", spent=mm.Ledger())
    assert not replace(plan, spent=mm.Ledger()).extends(person)


def test_a_plan_takes_the_number_of_samples_that_it_leaves_open(planned):
    open_ = mm.Plan(TWO, 1e-3)
    assert open_.bound_to(70) == replace(open_, population=70)
    with pytest.raises(mm.ModelMixError, match="below 1/1000"):
        open_.bound_to(1000)
    zero = mm.Plan(TWO, 1e-3, 70)
    assert zero.bound_to(70) is zero
    with pytest.raises(mm.ModelMixError, match="made for 70 samples and the data has 71"):
        zero.bound_to(71)
    private = mm.Plan(TWO, 1e-3, 70, "add-or-remove")
    assert private.bound_to(71) is private
    assert not planned
    for plan in (replace(open_, target=2.0), replace(zero, target=2.0), replace(private, target=2.0)):
        bound = plan.bound_to(70)
        assert planned.pop() == bound
        with pytest.raises(mm.BudgetExceeded):
            replace(plan, phases=(Phase(A, 11),)).bound_to(70)
        planned.clear()


def test_the_guarantee_of_a_plan_is_that_of_the_plan(planned):
    plan = mm.Plan(TWO)
    assert plan.guarantee() == 5
    assert planned == [plan]


# Files.


def test_a_plan_is_plain_data_and_comes_back():
    plan = mm.Plan(TWO, 1e-4, 70, "add-or-remove", "person", 2.5, EARLIER_PEOPLE)
    data = json.loads(json.dumps(plan.as_dict()))
    assert data == {
        "phases": [phase.as_dict() for phase in TWO],
        "delta": 1e-4,
        "population": 70,
        "adjacency": "add-or-remove",
        "unit": "person",
        "target": 2.5,
        "spent": EARLIER_PEOPLE.to_json(),
    }
    assert mm.Plan.from_dict(data) == plan
    bare = mm.Plan(TWO)
    assert bare.as_dict()["spent"] is None
    assert mm.Plan.from_dict(bare.as_dict()) == bare
    split = {**bare.as_dict(), "phases": [Phase(A, 1).as_dict(), Phase(A, 2).as_dict()]}
    assert mm.Plan.from_dict(split).phases == (Phase(A, 3),)


@pytest.mark.parametrize(
    "change",
    [
        *({name: "gone"} for name in mm.Plan(TWO).as_dict()),
        {"phases": 3},
        {"phases": None},
        {"spent": 3},
    ],
)
def test_a_plan_that_is_not_readable(change):
    data = {name: value for name, value in (mm.Plan(TWO).as_dict() | change).items() if value != "gone"}
    with pytest.raises(mm.ModelMixError, match="not readable"):
        mm.Plan.from_dict(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"phases": []}, "at least one phase"),
        ({"phases": [3]}, "every phase"),
        ({"spent": "{}"}, "not a ledger"),
        ({"delta": None}, "delta"),
        ({"unit": 3}, "30 letters"),
    ],
)
def test_a_plan_that_says_something_odd_is_refused_for_it(change, message):
    with pytest.raises(mm.ModelMixError, match=message):
        mm.Plan.from_dict(mm.Plan(TWO).as_dict() | change)


# Noise and signal.


def test_a_plan_of_noise_alone_is_refused(costs):
    """Four steps at z = 20 and q * n = 10 have noise of 40 in one direction, and gradients of at most 40."""

    def plan(z, **more):
        return mm.Plan.of(mm.Mechanism(z, 0.1), 4, **{"population": 100, "target": 2.0, "delta": 1e-3, **more})

    plan(20.0).require_signal()
    plan(40.0, target=None).require_signal()
    plan(40.0, population=None).require_signal()
    assert not costs
    with pytest.raises(mm.ModelMixError, match=r"epsilon 2 leaves only noise \(z = 40\): over all 4 .* 2 times"):
        plan(40.0).require_signal()
    assert costs.pop() == (mm.Ledger().add(mm.Mechanism(20.0, 0.1), 4), 1e-3, "best")
    with pytest.raises(mm.ModelMixError, match=r"epsilon 8 is the least"):
        plan(40.0, spent=EARLIER).require_signal()
    assert costs.pop()[0].phases == (*EARLIER.phases, Phase(mm.Mechanism(20.0, 0.1), 4))


def test_the_noise_of_all_phases_counts(costs):
    """Variances add up, and so do expected batches: sqrt(2 * 9 + 2 * 16) = 7.07 against 2 * 1 + 2 * 2 = 6."""
    phases = (Phase(mm.Mechanism(3.0, 0.1), 2), Phase(mm.Mechanism(4.0, 0.2), 2))
    plan = mm.Plan(phases, 1e-3, 10, target=2.0)
    with pytest.raises(mm.ModelMixError, match=r"z = 4\): over all 4 steps it is 1\.18 times"):
        plan.require_signal()
    (less,) = costs[0][0].phases
    assert less.mechanism.noise_multiplier == pytest.approx(3 * 6 / math.sqrt(50))
    assert less.steps == 4
    replace(plan, population=12).require_signal()


# mm.plan.


GIVEN = {"noise_multiplier": 2.0, "samples": 100, "batch": 10, "steps": 7}


def test_a_plan_of_given_noise_asks_no_accountant(costs):
    spent = mm.Ledger().add(A, 2)
    plan = mm.plan(**GIVEN, delta=1e-3, mixing_width=1.5, p=9, law="laplace", spent=spent)
    assert plan == mm.Plan((Phase(mm.Mechanism(2.0, 0.1, 1.5, 9, "laplace"), 7),), 1e-3, 100, spent=spent)
    assert plan.target is None
    by_rate = mm.plan(noise_multiplier=2.0, sample_rate=0.1, steps=7)
    assert by_rate == mm.Plan((Phase(mm.Mechanism(2.0, 0.1), 7),))
    public = mm.plan(noise_multiplier=2.0, sample_rate=0.1, steps=7, population=50)
    assert public == mm.Plan((Phase(mm.Mechanism(2.0, 0.1), 7),), 1e-5, 50, "add-or-remove")
    assert not costs


@pytest.mark.parametrize(("epochs", "steps"), [(1, 10), (2.5, 25), (2.51, 26), (0.01, 1)])
def test_epochs_are_steps_times_q_rounded_up(epochs, steps):
    assert mm.plan(noise_multiplier=2.0, sample_rate=0.1, epochs=epochs).steps == steps


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 1.0}, "one of epsilon and noise_multiplier: both"),
        ({"noise_multiplier": None}, "one of epsilon and noise_multiplier: none"),
        ({"sample_rate": 0.1}, "one of batch and sample_rate: both"),
        ({"batch": None}, "one of batch and sample_rate: none"),
        ({"epochs": 3}, "one of steps and epochs: both"),
        ({"steps": None}, "one of steps and epochs: none"),
        ({"population": 100}, "two claims"),
        ({"samples": None}, "batch needs samples or population"),
        ({"samples": 0}, "samples = 0"),
        ({"samples": 0.5}, "samples = 0.5"),
        ({"samples": None, "population": 2.5}, "population = 2.5"),
        ({"batch": 0}, "the expected batch must be greater than 0"),
        ({"batch": 101}, "q = batch / samples = 1.01"),
        ({"batch": None, "sample_rate": 1.5}, "q = 1.5"),
        ({"steps": None, "epochs": 0}, "number of epochs"),
        ({"delta": 1.0}, "strictly between"),
        ({"delta": 0.01}, "below 1/100"),
        ({"delta": 0.02, "samples": None, "batch": None, "sample_rate": 0.1}, "next to nothing"),
        ({"spent": 3}, "spent is the Ledger"),
    ],
)
def test_what_mm_plan_refuses(costs, change, message):
    with pytest.raises(mm.ModelMixError, match=message):
        mm.plan(**{**GIVEN, **change})
    assert not costs


def test_one_sample_is_a_data_set_and_a_batch_of_all_samples_is_q_1():
    assert mm.plan(noise_multiplier=2.0, samples=1, batch=1, steps=1).mechanism_at(1).sample_rate == 1


def test_the_noise_of_a_target_is_calibrated_over_everything_that_was_spent(costs, monkeypatch):
    told = []

    def calibrated(ledger_of, target, delta, spent):
        told.append((ledger_of(3.0), target, delta, spent))
        return 1.25

    monkeypatch.setattr(module, "calibrated_noise", calibrated)
    spent = mm.Ledger().add(A, 2)
    plan = mm.plan(epsilon=8, samples=100, batch=10, steps=7, delta=1e-3, spent=spent)
    assert plan == mm.Plan((Phase(mm.Mechanism(1.25, 0.1), 7),), 1e-3, 100, target=8.0, spent=spent)
    ledger = mm.Ledger((Phase(A, 2), Phase(mm.Mechanism(3.0, 0.1), 7)))
    assert told == [(replace(ledger, populations=(100,)), 8, 1e-3, spent)]
    assert mm.plan(epsilon=8, samples=100, batch=10, steps=7).spent == told[1][3] == mm.Ledger()
    monkeypatch.setattr(module, "calibrated_noise", lambda *_: 1e3)
    with pytest.raises(mm.ModelMixError, match="leaves only noise"):
        mm.plan(epsilon=8, samples=100, batch=10, steps=7)


def test_calibration_asks_the_best_accountant_and_begins_with_moments(costs, monkeypatch):
    told = {}

    def smallest(best, moments, target, **more):
        told.update(best=best(2.0), moments=moments(4.0), target=target, **more)
        return 1.5

    monkeypatch.setattr(module, "smallest_by_best", smallest)

    def ledger_of(z):
        return mm.Ledger().add(mm.Mechanism(z, 0.1), 6)

    assert calibrated_noise(ledger_of, 3, 1e-5, mm.Ledger(), 1e-3) == 1.5
    assert costs == [(ledger_of(2.0), 1e-5, "best"), (ledger_of(4.0), 1e-5, "renyi")]
    assert told == {
        "best": 6.0, "moments": 6.0, "target": 3.0, "start": 1.0, "tolerance": 1e-3, "name": "noise multiplier",
    }  # fmt: skip
    costs.clear()
    for bad in (0, None):
        with pytest.raises(mm.ModelMixError, match="target epsilon"):
            calibrated_noise(ledger_of, bad, 1e-5, mm.Ledger())
    assert not costs
    assert calibrated_noise(ledger_of, 2.5, 1e-5, mm.Ledger().add(A, 2)) == 1.5
    assert costs[0] == (mm.Ledger().add(A, 2), 1e-5, "best")
    assert told["tolerance"] == 1e-5
    for spent in (3, 4):
        with pytest.raises(mm.BudgetExceeded, match=rf"epsilon {spent}.0000 at delta 1e-05 and the target is 3: no"):
            calibrated_noise(ledger_of, 3, 1e-5, mm.Ledger().add(A, spent))


# The plan of a loop.


@pytest.mark.parametrize(
    ("batch", "many", "epochs", "used", "steps"),
    [
        (10, 100, 3, 10, 30),
        (7, 100, 1, 7, 14),
        (8, 100, 0.5, 8, 6),
        (10, 100, 0.25, 10, 3),
        (1000, 100, 2, 100, 2),
        (70, 100, 1, 70, 1),
    ],
)
@pytest.mark.parametrize("name", ["samples", "population"])
def test_a_loop_takes_the_batch_of_its_loader_and_whole_epochs(monkeypatch, name, batch, many, epochs, used, steps):
    """An epoch is about 1/q draws, at least one; nothing is drawn from more than all samples."""
    monkeypatch.setattr(module, "plan", lambda **given: given)
    found = plan_for_loop(batch, epochs, epsilon=2.0, **{name: many})
    assert found == {"batch": used, "steps": steps, "epsilon": 2.0, name: many}


def test_a_loop_without_numbers_is_refused():
    for batch, epochs, more, message in (
        (None, 1, {"samples": 10}, "no batch size"),
        (5, 0, {"samples": 10}, "number of epochs"),
        (5, 1, {}, "number of samples"),
        (5, 1, {"samples": -1}, "number of samples"),
    ):
        with pytest.raises(mm.ModelMixError, match=message):
            plan_for_loop(batch, epochs, **more)
