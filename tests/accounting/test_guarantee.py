"""One epsilon for one mechanism, whoever asks; and the relation for which it holds."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy.special import ndtr

import modelmix as mm
from modelmix.accounting import accountant
from modelmix.accounting.guarantee import quick_epsilon
from modelmix.accounting.pld import one_step_delta, pld_epsilon
from modelmix.cli import main
from modelmix.report.page import proved
from modelmix.report.page_data import Run
from modelmix.report.page_plots import epsilon_points

PLAIN = mm.Mechanism(1.0, 0.01)
STEPS, DELTA = 1000, 1e-5


def test_one_number_for_one_mechanism(tmp_path, capsys):
    """Renyi moments prove 2.1078, privacy-loss distributions 1.8283: every door shows the second."""
    one = mm.epsilon(PLAIN, DELTA, steps=STEPS)
    assert one == pytest.approx(1.8283, abs=5e-5)
    ledger = mm.Ledger().add(PLAIN, STEPS)
    file = tmp_path / "ledger.json"

    def printed(*arguments):
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        assert end.value.code == 0
        return json.loads(capsys.readouterr().out)

    said = printed("epsilon", "--json", "--z", 1, "--q", 0.01, "--steps", STEPS, "--save-ledger", file)
    run = Run({"delta": DELTA, "seed": None, "settings": {}}, ledger)
    page = proved(run)
    assert page is not None
    numbers = {
        "guarantee": mm.guarantee(ledger, DELTA).epsilon,
        "plan": mm.Plan.of(PLAIN, STEPS, delta=DELTA).guarantee().epsilon,
        "epsilon --json": said["epsilon"],
        "verify --json": printed("verify", file, "--json")["epsilon"],
        "compare --json": printed("compare", "--json", "--z", 1, "--q", 0.01, "--steps", STEPS)["epsilon"],
        "curve": mm.epsilon_curve(PLAIN, [1, 10, STEPS], DELTA)[-1],
        "page": page.epsilon,
        "plot of the page": epsilon_points(ledger, DELTA, page)[1][-1],
    }
    assert numbers == dict.fromkeys(numbers, one)
    assert said["accountant"] == "PLD"
    assert said["epsilon_renyi"] == mm.epsilon(ledger, DELTA, by="renyi") == pytest.approx(2.1078, abs=5e-5)
    assert not [key for key in said if "best_proved" in key]


@pytest.mark.parametrize(("epsilon", "q", "steps"), [(1.0, 0.2, 100), (3.0, 0.01, 1000), (8.0, 0.03, 3500)])
def test_calibration_is_tight_and_uses_the_best_accountant(epsilon, q, steps):
    given = {"epsilon": epsilon, "delta": DELTA, "sample_rate": q, "steps": steps}
    best, moments = mm.calibrate(**given), mm.calibrate(**given, by="renyi")
    assert epsilon - 1e-4 * epsilon <= mm.epsilon(best, DELTA, steps=steps) <= epsilon
    assert 0.84 < best.noise_multiplier / moments.noise_multiplier < 0.96
    plan = mm.plan(epsilon=epsilon, delta=DELTA, samples=50_000, sample_rate=q, steps=steps)
    assert epsilon - 1e-4 * epsilon <= plan.guarantee().epsilon <= epsilon


def test_the_best_number_is_never_above_any_accountant():
    for mechanism in (PLAIN, mm.Mechanism(0.335, 0.03, 2.0), mm.Mechanism(0.335, 0.03, 11.25, 100)):
        best = mm.epsilon(mechanism, DELTA, steps=300)
        assert best <= mm.epsilon(mechanism, DELTA, steps=300, by="renyi")
        assert best <= mm.epsilon(mechanism, DELTA, steps=300, by="classic")
        if not mechanism.mixed:
            assert best <= mm.epsilon(mechanism, DELTA, steps=300, by="pld")
        ledger = mm.Ledger().add(mechanism, 300)
        assert best * (1 - 1e-6) <= quick_epsilon(ledger, DELTA) <= best * (1 + 2e-3)


def test_a_curve_is_above_epsilon_everywhere_and_meets_it_at_the_end():
    steps = np.arange(1, 400, 13)
    curve = mm.epsilon_curve(PLAIN, steps, DELTA)
    assert np.all(np.diff(curve) >= 0)
    assert np.all(curve <= accountant.epsilon_curve(PLAIN, steps, DELTA) * (1 + 1e-12))
    for i in (0, 10, -1):
        assert curve[i] >= mm.epsilon(PLAIN, DELTA, steps=int(steps[i])) * (1 - 1e-9)
    assert curve[-1] == mm.epsilon(PLAIN, DELTA, steps=int(steps[-1]))


@pytest.mark.parametrize(("z", "q"), [(0.3, 0.03), (1.0, 0.01), (5.0, 0.5), (0.335, 1.0)])
def test_one_step_is_exact(z, q):
    mechanism = mm.Mechanism(z, q)
    epsilon = pld_epsilon(mm.Ledger().add(mechanism, 1), DELTA)
    assert DELTA * (1 - 1e-4) < one_step_delta(mechanism, epsilon) <= DELTA


def test_max_steps_is_exact_by_the_best_accountant():
    mechanism = mm.Mechanism(2.0, 0.05)
    steps = mm.max_steps(mechanism, epsilon=1.0, delta=DELTA)
    assert mm.epsilon(mechanism, DELTA, steps=steps) <= 1 < mm.epsilon(mechanism, DELTA, steps=steps + 1)
    assert steps > mm.max_steps(mechanism, epsilon=1.0, delta=DELTA, by="renyi")


# Relations.


def test_replacing_a_sample_without_sampling_is_half_the_noise():
    """Two clips apart: the Gaussian mechanism of z/2, whose exact delta is known."""
    epsilon = mm.epsilon(mm.Mechanism(4.0, 1.0), DELTA, steps=1, adjacency="replace-one")
    exact = ndtr(0.25 - 2 * epsilon) - math.exp(epsilon) * ndtr(-0.25 - 2 * epsilon)
    assert exact == pytest.approx(DELTA, rel=1e-2)


@pytest.mark.parametrize("mechanism", [PLAIN, mm.Mechanism(0.5, 0.02, 8.0, 25), mm.Mechanism(2.0, 0.1, law="laplace")])
def test_replacing_costs_more_than_removing_and_keeps_the_group_bound(mechanism):
    removed = mm.epsilon(mechanism, DELTA, steps=200)
    replaced = mm.guarantee(mechanism, DELTA, steps=200, adjacency="replace-one")
    assert replaced.epsilon >= removed
    half = replaced.epsilon / 2
    assert (1 + math.exp(half)) * mm.delta(mechanism, half, steps=200) <= DELTA * (1 + 1e-6)
    assert "replaced by any other" in replaced.scope


def test_what_a_ledger_can_claim_is_said():
    zero = mm.guarantee(mm.Ledger(population=50_000).add(PLAIN, 10), 1e-6)
    private = mm.guarantee(mm.Ledger(adjacency="add-or-remove", population=60_000).add(PLAIN, 10), 1e-6)
    assert zero.epsilon == private.epsilon
    assert "zero-out; the number of samples, 50,000, is public" in zero.scope
    assert "the number of samples is private; every scale comes from the public constant 60,000" in private.scope
    assert [line for line in zero.not_covered if "number of samples" in line]
    assert not [line for line in private.not_covered if "number of samples" in line]
    assert mm.guarantee(mm.Ledger(population=50_000).add(PLAIN, 10), 1e-5).notes
    with pytest.raises(mm.ModelMixError, match="population"):
        mm.guarantee(mm.Ledger(population=50_000).add(PLAIN, 10), 1e-6, adjacency="add-or-remove")
    with pytest.raises(mm.ModelMixError, match="population"):
        mm.Ledger(adjacency="add-or-remove")


def test_what_is_added_up_keeps_the_weaker_claim():
    zero = mm.Ledger(population=50_000).add(PLAIN, 10)
    private = mm.Ledger(adjacency="add-or-remove", population=60_000, seeded=True).add(PLAIN, 5)
    for joined in (zero.then(private), private.then(zero)):
        assert (joined.adjacency, joined.population, joined.seeded, joined.steps) == ("zero-out", None, True, 15)
    assert mm.Ledger().then(private) == private == private.then(mm.Ledger())


def test_a_delta_of_one_over_n_is_refused():
    with pytest.raises(mm.ModelMixError, match="below 1/100000"):
        mm.plan(epsilon=1, delta=1e-5, samples=100_000, batch=100, steps=10)


def test_a_plan_refuses_what_would_cost_more():
    plan = mm.plan(epsilon=1, delta=DELTA, population=20_000, batch=200, steps=50)
    assert (plan.adjacency, plan.expected_batch(1)) == ("add-or-remove", 200)
    plan.require(50)
    with pytest.raises(mm.BudgetExceeded, match="past the end"):
        plan.require(51)
    assert plan.extended(50).guarantee().epsilon > 1
    spent = mm.Ledger().add(mm.Mechanism(1.0, 1.0), 1)
    with pytest.raises(mm.BudgetExceeded, match="nothing is left"):
        mm.plan(epsilon=1, delta=DELTA, samples=20_000, batch=200, steps=50, spent=spent)


def test_two_empty_ledgers_take_on_the_claim_of_the_second():
    """A loop over a population that has not stepped yet claims what its plan claims."""
    claim = mm.Ledger(adjacency="add-or-remove", population=50)
    assert mm.Ledger().then(claim) == claim
    assert mm.Ledger().then(claim).add(mm.Mechanism(1.0, 0.1)).adjacency == "add-or-remove"
