"""One epsilon for one mechanism, whoever asks; and the relation for which it holds."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from scipy.special import ndtr

import modelmix as mm
from modelmix.accounting import accountant
from modelmix.accounting import guarantee as module
from modelmix.accounting.guarantee import quick_epsilon
from modelmix.accounting.pld import ROUGH, halved, one_step_delta, pld_epsilon, unmixed
from modelmix.cli import main
from modelmix.runs.page import proved
from modelmix.runs.page_data import Run
from modelmix.runs.page_plots import epsilon_points

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


# What a guarantee says.

ASSUMED = (
    "moments of an unlisted noise law convex in the clipped norm and falling with the width: on a grid",
    "quadrature error of the moments estimated by halving panels, and added tenfold",
    "the samples in whose directions gradients are embedded are public",
)
MIXED, LOUD = mm.Mechanism(1.0, 0.1, 2.0), mm.Mechanism(9.0, 0.1)
MIXED_LAPLACE = mm.Mechanism(1.0, 0.1, 2.0, law="laplace")


@dataclass(frozen=True)
class Narrow(mm.Gaussian):
    """A subclass may have changed the density: its worst gradient is not known."""


def test_a_bare_guarantee_says_nothing_that_is_not_known():
    found = mm.Guarantee(1.0, 0.5, "RDP")
    said = (found.order, found.reason, found.adjacency, found.unit, found.population, found.steps, found.seeded)
    assert said == (0.0, None, "zero-out", "sample", None, 0, False)
    assert found.assumed == found.excluded == found.populations == found.notes == ()


def test_a_delta_near_one_over_the_largest_population_has_a_note():
    """0.0125 is 1/(10 * 8)."""
    edge = mm.Guarantee(1.0, 0.0125, "RDP", populations=(2, 8))
    assert edge.delta * 10 * 8 == 1
    assert edge.notes == ()
    above = replace(edge, delta=0.02)
    assert above.notes == ("delta = 0.02 is large for n = 8: a delta below 1/(10 n) = 0.013 is better.",)
    assert replace(above, populations=(2,)).notes == ()
    assert "n = 1,000: a" in replace(above, populations=(1000,)).notes[0]


def test_what_epsilon_does_not_cover():
    zero = mm.Guarantee(1.0, 1e-5, "RDP", excluded=("the labels",))
    assert zero.not_covered == (
        "the number of samples: it is public in this guarantee",
        "the labels",
        *module._NOT_COVERED,
    )
    assert replace(zero, adjacency="replace-one").not_covered == zero.not_covered
    assert replace(zero, adjacency="add-or-remove").not_covered == ("the labels", *module._NOT_COVERED)


def test_a_guarantee_as_plain_data_and_as_text():
    found = mm.Guarantee(
        1.23456,
        0.02,
        "RDP",
        7.5,
        "a reason",
        "add-or-remove",
        "person",
        8,
        40,
        True,
        ("one", "two"),
        ("three",),
        (2, 8),
    )
    assert json.loads(json.dumps(found.as_dict())) == {
        "epsilon": 1.23456, "delta": 0.02, "accountant": "RDP", "order": 7.5, "reason": "a reason",
        "adjacency": "add-or-remove", "unit": "person", "population": 8, "populations": [2, 8],
        "sampling": "Poisson", "steps": 40, "seeded": True, "scope": found.scope, "notes": list(found.notes),
        "covered": list(module.COVERED), "not_covered": list(found.not_covered), "assumed": ["one", "two"],
    }  # fmt: skip
    assert str(found).splitlines() == [
        f"epsilon 1.2346 at delta 0.02 (RDP). {found.scope}", "Assumed: one.", "Assumed: two.",
        "Not covered: three.", *found.notes,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("mechanisms", "assumed"),
    [
        ((), ()),
        ((PLAIN,), ()),
        ((mm.Mechanism(1.0, 0.1, law="laplace"),), ()),
        ((mm.Mechanism(1.0, 0.1, law="laplace"), MIXED), ()),
        ((PLAIN, MIXED), ()),
        ((MIXED, PLAIN, MIXED_LAPLACE), ASSUMED[1:2]),
        ((PLAIN, mm.EmbeddingMechanism(1.0, 0.1)), ASSUMED[2:]),
        ((mm.EmbeddingMechanism(1.0, 0.1, 2.0), PLAIN), ASSUMED[2:]),
        ((mm.Mechanism(1.0, 0.1, law=Narrow), PLAIN), ASSUMED[:2]),
    ],
)
def test_what_a_number_rests_on_besides_theorems(mechanisms, assumed):
    ledger = mm.Ledger()
    for mechanism in mechanisms:
        ledger = ledger.add(mechanism, 2)
    assert module.assumptions(ledger) == (*assumed, module.IDEAL, *module.PRECONDITIONS)
    losses = [line for line in assumed if line != ASSUMED[1] or ASSUMED[0] in assumed]
    assert module.assumptions(ledger, "PLD cone") == (*losses, module.IDEAL, *module.PRECONDITIONS)


# What is asked, without any accountant.


def test_what_would_run_as_a_ledger():
    ledger = mm.Ledger().add(PLAIN, 3)
    assert module.as_ledger(PLAIN, 3) == ledger
    assert module.as_ledger(ledger) is ledger
    plan = mm.Plan.of(PLAIN, 3)
    assert module.as_ledger(plan) is plan.ledger
    for source, steps, message in (
        (PLAIN, None, "say for how many steps"),
        (ledger, 3, "a ledger knows its steps"),
        (plan, 3, "a ledger knows its steps"),
        ("plain", None, "'plain' is neither a Plan, a Ledger nor a Mechanism"),
        (None, 3, "neither a Plan"),
    ):
        with pytest.raises(mm.ModelMixError, match=message):
            module.as_ledger(source, steps)


@pytest.fixture
def found(monkeypatch):
    """Proofs of 2.0, and of 5.0 for replacing; with who was asked for them."""
    asked = []

    def proof(name, epsilon):
        def of(ledger, delta, by):
            asked.append((name, ledger, delta, by))
            return mm.Guarantee(epsilon, delta, "RDP", 3.0, "a reason")

        monkeypatch.setattr(module, name, of)

    proof("_best", 2.0)
    proof("_replace_one", 5.0)
    return asked


def test_a_guarantee_carries_the_claim_of_its_ledger(found):
    ledger = mm.Ledger(unit="person", population=50, seeded=True).add(MIXED, 3)
    assert mm.guarantee(ledger, 1e-3, by="classic") == mm.Guarantee(
        2.0,
        1e-3,
        "RDP",
        3.0,
        "a reason",
        "zero-out",
        "person",
        50,
        3,
        True,
        (module.IDEAL, *module.PRECONDITIONS),
        (),
        (50,),
    )
    assert found == [("_best", ledger, 1e-3, "classic")]
    assert mm.epsilon(ledger, 1e-3, by="renyi", adjacency="replace-one") == 5
    assert found[1:] == [("_replace_one", ledger, 1e-3, "renyi")]
    assert mm.epsilon(MIXED, 1e-3, steps=3) == 2
    assert found[2:] == [("_best", mm.Ledger().add(MIXED, 3), 1e-3, "best")]


def test_which_relation_is_claimed(found):
    zero, private = (mm.Ledger(adjacency=a, population=50).add(PLAIN) for a in ("zero-out", "add-or-remove"))
    for source, steps, asked, relation, population in (
        (zero, None, None, "zero-out", 50),
        (zero, None, "replace-one", "replace-one", 50),
        (private, None, None, "add-or-remove", 50),
        (private, None, "add-or-remove", "add-or-remove", 50),
        (private, None, "zero-out", "zero-out", None),
        (private, None, "replace-one", "replace-one", None),
        (PLAIN, 1, None, "zero-out", None),
        (PLAIN, 1, "add-or-remove", "add-or-remove", None),
        (PLAIN, 1, "replace-one", "replace-one", None),
    ):
        said = mm.guarantee(source, 1e-3, steps=steps, adjacency=asked)
        assert (said.adjacency, said.population) == (relation, population)
        assert said.epsilon == (5.0 if relation == "replace-one" else 2.0)
    for source in (zero, mm.Plan(zero.phases), mm.Ledger().add(PLAIN)):
        with pytest.raises(mm.ModelMixError, match="give a population"):
            mm.guarantee(source, 1e-3, adjacency="add-or-remove")


def test_what_a_guarantee_is_not_given_for(found):
    ledger = mm.Ledger(population=500).add(PLAIN)
    for source, given, message in (
        (ledger, {"delta": 1e-3, "by": "worst"}, "by = 'worst' is unknown: choose one of best, renyi, classic, pld"),
        (ledger, {"delta": 0}, "strictly between"),
        (ledger, {}, "not a finite number"),
        (ledger, {"delta": 2e-3}, "below 1/500"),
        (mm.Ledger(ledger.phases, populations=(500, 3)), {"delta": 2e-3}, "below 1/500"),
        (mm.Ledger(ledger.phases, ("a rule",)), {"delta": 1e-3}, "a rule"),
    ):
        with pytest.raises(mm.ModelMixError, match=message):
            mm.guarantee(source, **given)
    assert not found
    assert mm.guarantee(mm.Ledger().add(PLAIN), np.float32(0.25)).delta == 0.25, "no population: any probability"


def test_the_delta_and_the_target_of_a_plan(found):
    plan = mm.Plan.of(PLAIN, 3, delta=1e-4, population=60)
    assert mm.guarantee(plan).delta == 1e-4
    assert mm.guarantee(plan, 1e-3).delta == 1e-3
    kept = mm.Plan.of(PLAIN, 3, delta=1e-4, population=60, target=2.0)
    assert mm.guarantee(kept).epsilon == 2
    assert mm.guarantee(replace(kept, target=2.0 * (1 - 1e-10))).epsilon == 2, "rounding is not a breach"
    private = replace(kept, adjacency="add-or-remove", target=1.99)
    for dear in (replace(kept, target=1.99), private, replace(kept, target=2.0 * (1 - 3e-9))):
        with pytest.raises(mm.BudgetExceeded, match=r"costs epsilon 2.000000 and was made for"):
            mm.guarantee(dear)
        with pytest.raises(mm.BudgetExceeded):
            mm.guarantee(dear, 1e-4)
        # Another question than the one it was made for.
        assert mm.guarantee(dear, 1e-3).epsilon == 2
        assert mm.guarantee(dear, by="renyi").epsilon == 2
        assert mm.guarantee(dear, adjacency="replace-one").epsilon == 5
    assert mm.guarantee(private, adjacency="zero-out").epsilon == 2


# Which proof is taken.


@pytest.fixture
def proofs(monkeypatch):
    """Numbers of accountants by name, to be changed by a test; ``asked`` lists the questions."""
    said = {
        "RDP": 2.0,
        "order": 4.0,
        "PLD": 1.0,
        "one step": 0.0,
        "worth": True,
        "moments delta": 0.5,
        "pld delta": 0.25,
        "losses": math.inf,
        "why": None,
        "losses delta": 1.0,
        "losses asked": [],
    }
    asked = said["asked"] = []

    def moments(ledger, delta, *, steps=None, conversion="improved"):
        asked.append(("RDP", ledger, conversion))
        return accountant.RenyiBound(said["RDP"], delta, said["order"], conversion, "a reason")

    def distribution(ledger, delta, resolution=None):
        asked.append(("PLD", ledger, resolution))
        return said["PLD"]

    def one_step(mechanism, epsilon):
        asked.append(("one step", mechanism, epsilon))
        return said["one step"]

    def moments_delta(ledger, epsilon, *, conversion):
        asked.append(("moments delta", ledger, conversion))
        return said["moments delta"]

    def pld_delta(ledger, epsilon):
        asked.append(("pld delta", ledger, epsilon))
        return said["pld delta"]

    monkeypatch.setattr(accountant, "guarantee", moments)
    monkeypatch.setattr(accountant, "delta", moments_delta)
    monkeypatch.setattr(module.pld, "pld_epsilon", distribution)
    monkeypatch.setattr(module.pld, "pld_delta", pld_delta)

    def losses(phases, delta, tolerance=None):
        said["losses asked"].append((phases, delta, tolerance))
        return said["losses"], said["why"]

    monkeypatch.setattr(module.pld, "one_step_delta", one_step)
    monkeypatch.setattr(module, "loss_epsilon", losses)
    monkeypatch.setattr(module, "loss_delta", lambda phases, epsilon, tolerance=None: said["losses delta"])
    return said


@pytest.fixture
def worth(proofs, monkeypatch):
    """The same, and whether distributions are worth their time is said by the test."""

    def ask(ledger, found=None):
        proofs["asked"].append(("worth", ledger, found and found.epsilon))
        return proofs["worth"]

    monkeypatch.setattr(module, "_worth_distributions", ask)
    return proofs


def test_the_smallest_of_the_proofs_is_taken(worth):
    plain, mixed = mm.Ledger().add(LOUD, 2), mm.Ledger().add(LOUD, 1).add(MIXED, 1)
    moments = mm.Guarantee(2.0, 1e-5, "RDP", 4.0, "a reason")
    assert module._best(plain, 1e-5, "best") == mm.Guarantee(1.0, 1e-5, "PLD")
    assert worth["asked"] == [("RDP", plain, "improved"), ("worth", plain, 2.0), ("PLD", plain, None)]
    post = "of the same noise without mixing, of which mixing is post-processing"
    assert module._best(mixed, 1e-5, "best") == mm.Guarantee(1.0, 1e-5, "PLD", reason=post)
    assert worth["asked"][-1][1] == unmixed(mixed)
    worth["asked"].clear()
    assert module._best(mixed, 1e-5, "pld") == mm.Guarantee(1.0, 1e-5, "PLD")
    assert worth["asked"] == [("PLD", mixed, None)], "which refuses it"
    for by, conversion in (("renyi", "improved"), ("classic", "classic")):
        worth["asked"].clear()
        assert module._best(plain, 1e-5, by) == moments
        assert worth["asked"] == [("RDP", plain, conversion)]
    for better in (2.0, 2.5):
        worth["PLD"] = better
        assert module._best(plain, 1e-5, "best") == moments
    worth.update(PLD=1.0, worth=False)
    assert module._best(plain, 1e-5, "best") == moments
    worth.update(worth=True, order=math.inf)
    assert module._best(plain, 1e-5, "best") == replace(moments, accountant="pure", order=math.inf)
    worth.update(order=4.0, RDP=0.0, PLD=-1.0)
    assert module._best(plain, 1e-5, "best").epsilon == 0


def test_losses_of_the_worst_gradient_are_one_of_the_proofs(worth):
    mixed, laplace = mm.Ledger().add(LOUD, 1).add(MIXED, 1), mm.Ledger().add(MIXED_LAPLACE, 2)
    worth.update(PLD=3.0, losses=1.5)
    assert module._best(mixed, 1e-5, "best") == mm.Guarantee(1.5, 1e-5, "PLD cone")
    assert worth["asked"][-2:] == [("worth", mixed, 1.5), ("PLD", unmixed(mixed), None)]
    worth["PLD"] = 1.25
    assert module._best(mixed, 1e-5, "best").epsilon == 1.25, "the same noise without mixing may be better still"
    worth["PLD"] = 3.0
    assert module._best(laplace, 1e-5, "best") == mm.Guarantee(1.5, 1e-5, "PLD")
    worth["order"] = math.inf
    assert module._best(laplace, 1e-5, "best") == mm.Guarantee(1.5, 1e-5, "PLD"), "below the pure bound as well"
    worth["order"] = 4.0
    for by in ("cone", "pld"):
        assert module._best(laplace, 1e-5, by) == mm.Guarantee(1.5, 1e-5, "PLD")
    assert module._best(mixed, 1e-5, "cone") == mm.Guarantee(1.5, 1e-5, "PLD cone")
    worth.update(losses=math.inf, why="too wide")
    moments = mm.Guarantee(2.0, 1e-5, "RDP", 4.0, "a reason; too wide")
    assert module._best(mixed, 1e-5, "best") == moments, "it falls back, and says why"
    assert module._best(mixed, 1e-5, "cone") == mm.Guarantee(math.inf, 1e-5, "PLD cone", reason="too wide")
    worth["losses asked"].clear()
    module._best(mm.Ledger().add(LOUD, 2), 1e-5, "best")
    for by in ("renyi", "classic", "pld"):
        module._best(mixed, 1e-5, by)
    assert not worth["losses asked"], "plain Gaussian noise has a tight accountant of its own"
    worth["losses delta"] = 0.125
    assert module._delta(mixed, 3.0, "best") == module._delta(mixed, 3.0, "cone") == 0.125
    assert module._delta(laplace, 3.0, "pld") == 0.125
    assert module._delta(mixed, 3.0, "pld") == 0.25
    assert module._delta(mixed, 3.0, "renyi") == 0.5


def test_when_a_distribution_is_sound_and_can_help(proofs):
    plain, mixed = mm.Ledger().add(LOUD, 2), mm.Ledger().add(LOUD, 1).add(MIXED, 1)
    bound = accountant.RenyiBound(2.0, 1e-5, 4.0, "improved")
    laplace = mm.Mechanism(1.0, 0.1, law="laplace")
    assert not module._worth_distributions(plain.add(laplace))
    assert not module._worth_distributions(plain.add(laplace), bound)
    many = mm.Ledger()
    for i in range(32):
        many = many.add(mm.Mechanism(1.0 + i, 0.1), 1)
    assert module._worth_distributions(many)
    assert not module._worth_distributions(many.add(mm.Mechanism(99.0, 0.1), 1))
    assert module._worth_distributions(mixed)
    assert module._worth_distributions(plain, bound)
    assert not proofs["asked"]
    assert module._worth_distributions(mixed, bound)
    assert proofs["asked"] == [
        ("one step", LOUD, 2.0),
        ("one step", mm.Mechanism(1.0, 0.1), 2.0),
        ("PLD", unmixed(mixed), ROUGH),
    ]
    proofs["PLD"] = 2.03  # 0.98 * 2.03 < 2
    assert module._worth_distributions(mixed, bound)
    proofs["PLD"] = 2.05
    assert not module._worth_distributions(mixed, bound)
    proofs["PLD"] = 1.0
    assert not module._worth_distributions(mixed, replace(bound, epsilon=0.98)), "no gain is no gain"
    proofs["one step"] = 1e-5
    assert module._worth_distributions(mixed, bound)
    proofs["one step"] = 1.01e-5
    assert not module._worth_distributions(mixed, bound)


def test_the_quick_number_is_one_of_the_proofs(worth):
    ledger = mm.Ledger().add(LOUD, 2).add(MIXED, 1)
    assert quick_epsilon(ledger, 1e-5) == 1
    assert worth["asked"][-1] == ("PLD", unmixed(ledger), ROUGH)
    worth["PLD"] = 3.0
    assert quick_epsilon(ledger, 1e-5) == 2
    worth.update(PLD=1.0, **{"one step": 1e-5})
    assert quick_epsilon(ledger, 1e-5) == 1
    worth.update(PLD=2.0, losses=0.75)
    assert quick_epsilon(ledger, 1e-5) == 0.75
    assert worth["losses asked"][-1] == (ledger.phases, 1e-5, module.ROUGH), "on a coarse grid"
    worth.update(PLD=1.0, losses=math.inf)
    for change in ({"one step": 1.01e-5}, {"worth": False}, {"order": math.inf}, {"RDP": 0.0, "PLD": -1.0}):
        before = dict(worth)
        worth.update(change)
        assert quick_epsilon(ledger, 1e-5) == worth["RDP"]
        worth.update({name: before[name] for name in change} | {"PLD": 1.0})


def test_the_smallest_delta_of_the_proofs(worth):
    ledger = mm.Ledger().add(LOUD, 2).add(MIXED, 1)

    def asked(by):
        worth["asked"].clear()
        return module._delta(ledger, 3.0, by), [(name, *rest) for name, *rest in worth["asked"]]

    assert asked("renyi") == (0.5, [("moments delta", ledger, "improved")])
    assert asked("classic") == (0.5, [("moments delta", ledger, "classic")])
    assert asked("pld") == (0.25, [("pld delta", ledger, 3.0)])
    best = [("moments delta", ledger, "improved"), ("worth", ledger, None), ("pld delta", unmixed(ledger), 3.0)]
    assert asked("best") == (0.25, best)
    worth["pld delta"] = 0.75
    assert asked("best") == (0.5, best)
    worth["worth"] = False
    assert asked("best") == (0.5, best[:2])
    worth["moments delta"], worth["pld delta"] = math.inf, math.inf
    assert asked("renyi")[0] == asked("pld")[0] == 1


def test_delta_asks_for_what_the_ledger_can_claim(monkeypatch):
    said, asked = {}, []

    def of(ledger, epsilon, by):
        asked.append((ledger, epsilon, by))
        return said.get((ledger.phases[0].mechanism.noise_multiplier, by), said[by])

    monkeypatch.setattr(module, "_delta", of)
    said.update(best=0.5, renyi=0.6, classic=0.7, pld=0.4)
    ledger = mm.Ledger(population=10).add(LOUD, 2)
    for by in said:
        assert mm.delta(ledger, 3, by=by) == said[by]
        assert asked.pop() == (ledger, 3.0, by)
        assert mm.delta(LOUD, 3, steps=2, by=by, adjacency="add-or-remove") == said[by]
        assert asked.pop() == (mm.Ledger().add(LOUD, 2), 3.0, by)
    for source, given, message in (
        (ledger, {"by": "worst"}, "is unknown"),
        (ledger, {"epsilon": -1.0}, "0 or more"),
        (ledger, {"steps": 3}, "knows its steps"),
        (ledger, {"adjacency": "add-or-remove"}, "give a population"),
        (mm.Ledger(ledger.phases, ("a rule",)), {}, "a rule"),
    ):
        with pytest.raises(mm.ModelMixError, match=message):
            mm.delta(source, **{"epsilon": 3.0, **given})
    assert not asked


def test_delta_of_replacing_is_the_smaller_of_two_bounds(monkeypatch):
    """(1 + e^(epsilon/2)) delta(epsilon/2), and half the noise without sampling."""
    said, asked = {("twice", "renyi"): 0.9}, []
    twice = halved(mm.Ledger().add(LOUD, 2))

    def of(ledger, epsilon, by):
        asked.append(("twice" if ledger == twice else "once", epsilon, by))
        return said[asked[-1][0], by]

    monkeypatch.setattr(module, "_delta", of)
    group = (1 + math.e**1.5) * 0.01

    def ask(by="best", mechanism=LOUD):
        asked.clear()
        return mm.delta(mechanism, 3.0, steps=2, by=by, adjacency="replace-one")

    for by in ("best", "renyi", "classic", "pld"):
        said.update({("once", by): 0.01, ("twice", by): 0.9})
        assert ask(by) == pytest.approx(group)
        assert asked[0] == ("once", 1.5, by)
        said["twice", by] = 0.02
        assert ask(by) == 0.02
        assert asked[-1] == ("twice", 3.0, by)
    said["once", "best"] = 0.0
    assert ask() == 0
    said["once", "best"] = 0.9
    said["twice", "best"] = 1.0
    assert ask() == 1, "a probability"
    said["twice", "renyi"] = 1.0  # moments prove nothing: distributions are not asked
    assert ask() == 1
    assert asked == [("once", 1.5, "best"), ("twice", 3.0, "renyi"), ("twice", 3.0, "renyi")]
    ask("pld")
    assert asked == [("once", 1.5, "pld"), ("twice", 3.0, "pld")]
    # No second bound: a law of one's own, and a distribution of a mixed mechanism.
    said["once", "best"] = said["once", "pld"] = 0.01
    own = mm.Mechanism(9.0, 0.1, law=lambda z: mm.Gaussian(z))
    assert ask(mechanism=own) == pytest.approx(group)
    assert asked == [("once", 1.5, "best")]
    said["once", "best"] = 0.9
    assert ask(mechanism=own) == 1, "a probability"
    said["once", "best"] = 0.01
    assert ask("pld", mm.Mechanism(9.0, 0.1, 2.0)) == pytest.approx(group)
    assert asked == [("once", 1.5, "pld")]
    twice = halved(mm.Ledger().add(mm.Mechanism(9.0, 0.1, 2.0), 2))
    said["twice", "best"] = 0.02
    said["twice", "renyi"] = 0.5
    assert ask(mechanism=mm.Mechanism(9.0, 0.1, 2.0)) == 0.02
    twice = halved(mm.Ledger().add(mm.Mechanism(9.0, 1.0), 2))
    said["twice", "renyi"] = 1.0
    assert ask(mechanism=mm.Mechanism(9.0, 1.0)) == 0.02, "without sampling the second bound is the exact one"
    assert asked == [("once", 1.5, "best"), ("twice", 3.0, "best")]


# Replacing, from the parts.


@pytest.fixture
def parts(monkeypatch):
    """Epsilon of half the noise by each accountant, and that of the group; with the questions."""
    said = {"best": 4.0, "renyi": 4.5, "classic": 5.0, "pld": 3.5, "group": 6.0, "asked": []}

    def best(ledger, target, by):
        said["asked"].append((ledger, target, by))
        return mm.Guarantee(said[by], target, "RDP")

    def group(ledger, target, by):
        said["asked"].append(("group", target, by))
        return mm.Guarantee(said["group"], target, "group")

    monkeypatch.setattr(module, "_best", best)
    monkeypatch.setattr(module, "_group_of_two", group)
    return said


def test_replacing_without_sampling_and_mixing_is_half_the_noise_alone(parts):
    ledger = mm.Ledger().add(mm.Mechanism(9.0, 1.0), 2).add(mm.Mechanism(5.0, 1.0), 1)
    for by in ("best", "renyi", "classic", "pld"):
        parts["asked"].clear()
        assert module._replace_one(ledger, 1e-5, by) == mm.Guarantee(parts[by], 1e-5, "RDP")
        assert parts["asked"] == [(halved(ledger), 1e-5, by)]


@pytest.mark.parametrize("mechanism", [LOUD, mm.Mechanism(9.0, 0.1, 2.0), mm.Mechanism(9.0, 1.0, 2.0)])
def test_replacing_is_the_smaller_of_half_the_noise_and_a_group_of_two(parts, mechanism):
    ledger = mm.Ledger().add(mm.Mechanism(5.0, 1.0), 1).add(mechanism, 2)
    twice = halved(ledger)
    unsampled = mechanism.sample_rate == 1
    reason = None if unsampled else "of half the noise without sampling"
    for by in ("renyi", "classic"):
        parts["asked"].clear()
        assert module._replace_one(ledger, 1e-5, by) == mm.Guarantee(parts[by], 1e-5, "RDP", reason=reason)
        assert parts["asked"] == [("group", 1e-5, by), (twice, 1e-5, by)]
    parts["asked"].clear()
    assert module._replace_one(ledger, 1e-5, "best") == mm.Guarantee(4.0, 1e-5, "RDP", reason=reason)
    assert parts["asked"] == [("group", 1e-5, "best"), (twice, 1e-5, "renyi"), (twice, 1e-5, "best")]
    parts["asked"].clear()
    assert module._replace_one(ledger, 1e-5, "pld") == mm.Guarantee(6.0, 1e-5, "group")
    assert parts["asked"] == [("group", 1e-5, "pld")]
    for group in (4.0, 3.9):
        parts["group"] = group
        assert module._replace_one(ledger, 1e-5, "best") == mm.Guarantee(group, 1e-5, "group")
    # Moments far above the group: distributions will not help, but where nothing is sampled they are asked.
    for group, renyi, hopeless in ((6.0, 17.9, False), (6.0, 18.0, True), (0.5, 2.9, False), (0.5, 3.0, True)):
        parts.update(group=group, renyi=renyi)
        parts["asked"].clear()
        module._replace_one(ledger, 1e-5, "best")
        assert len(parts["asked"]) == (2 if hopeless and not unsampled else 3)
    own = mm.Ledger().add(mm.Mechanism(9.0, mechanism.sample_rate, law=lambda z: mm.Gaussian(z)), 2)
    parts["asked"].clear()
    parts["group"] = 6.0
    assert module._replace_one(own, 1e-5, "best").accountant == "group"
    assert parts["asked"] == [("group", 1e-5, "best")]


def test_a_group_of_two_from_delta(monkeypatch):
    """With delta(e) = C / e / (1 + exp(e)), the least e with (1 + exp(e)) delta(e) <= target is C/target."""
    said, asked = {"C": 5.0, "pld": math.inf, "worth": False}, []

    def delta_(ledger, epsilon, by):
        asked.append(by)
        return said["C"] / max(epsilon, 1e-9) / (1 + math.exp(epsilon))

    def distribution(ledger, target):
        asked.append(ledger)
        return said["pld"]

    monkeypatch.setattr(module, "delta", delta_)
    monkeypatch.setattr(module, "_worth_distributions", lambda ledger: said["worth"])
    monkeypatch.setattr(module.pld, "pld_group_epsilon", distribution)
    monkeypatch.setattr(
        module, "loss_delta", lambda phases, e, tolerance: min(1.0, delta_(None, e, "renyi") * said["losses"])
    )
    said["losses"] = math.inf
    ledger = mm.Ledger().add(MIXED, 2)
    way = "by way of the dataset without the unit"
    for by, moments in (("best", "renyi"), ("renyi", "renyi"), ("classic", "classic")):
        asked.clear()
        for c in (0.3, 1.0, 5.0, 16.0, 200.0, 255.9):
            said["C"] = c
            bound = module._group_of_two(ledger, 1.0, by)
            assert c * (1 - 1e-12) <= bound.epsilon / 2 <= c * (1 + 1.1e-4)
            assert replace(bound, epsilon=0.0) == mm.Guarantee(0.0, 1.0, "RDP, group of two", reason=way)
        assert set(asked) == {moments}
        said["C"] = 257.0
        none = mm.Guarantee(
            math.inf, 1.0, "RDP, group of two", reason="no finite epsilon is proved for replacing a unit"
        )
        assert module._group_of_two(ledger, 1.0, by) == none
    said.update(C=5.0, worth=True)
    for tighter in (4.0, math.inf):
        said["pld"] = tighter
        bound = module._group_of_two(ledger, 1.0, "best")
        assert asked[-1] == unmixed(ledger)
        assert bound.accountant == ("PLD, group of two" if tighter == 4 else "RDP, group of two")
    said["pld"] = 4.0
    assert module._group_of_two(ledger, 1.0, "best") == mm.Guarantee(8.0, 1.0, "PLD, group of two", reason=way)
    assert module._group_of_two(ledger, 1.0, "renyi").epsilon >= 10
    asked.clear()
    assert module._group_of_two(ledger, 1.0, "pld") == mm.Guarantee(8.0, 1.0, "PLD, group of two", reason=way)
    assert asked == [ledger]
    said.update(C=5.0, pld=math.inf, losses=0.5)
    bound = module._group_of_two(ledger, 1.0, "best")
    assert bound.accountant == "PLD cone, group of two"
    assert bound.epsilon / 2 == pytest.approx(2.5, rel=1.1e-4)
    said["C"], said["pld"] = 0.0, 4.0
    assert module._group_of_two(ledger, 1.0, "best").accountant == "RDP, group of two"


# Curves.


def test_a_curve_asks_distributions_at_sixteen_counts(monkeypatch):
    said, quick = {"end": 0.5}, []
    monkeypatch.setattr(
        accountant,
        "epsilon_curve",
        lambda mechanism, steps, delta, conversion: np.ravel(steps) * (1.0 if conversion == "improved" else 2.0),
    )

    def end(mechanism, delta, steps):
        assert (mechanism, delta) == (PLAIN, 1e-5)
        return mm.Guarantee(said["end"] * steps, delta, "PLD")

    monkeypatch.setattr(module, "guarantee", end)

    def rough(ledger, delta):
        assert delta == 1e-5
        quick.append(ledger)
        return 0.6 * ledger.steps

    monkeypatch.setattr(module, "quick_epsilon", rough)
    steps = np.arange(1, 32)
    odd = steps + (1 - steps % 2)  # every second of 31 counts is asked, and a count has what the next one has
    wanted = np.minimum(np.minimum(steps, np.where(odd == 31, 15.5, 0.6 * odd)), 15.5)
    np.testing.assert_allclose(mm.epsilon_curve(PLAIN, steps, 1e-5), wanted)
    assert quick == [mm.Ledger().add(PLAIN, t) for t in range(1, 31, 2)]
    mixed_up = np.array([7, 31, 2, 7])
    quick.clear()
    np.testing.assert_allclose(mm.epsilon_curve(PLAIN, mixed_up, 1e-5), [4.2, 15.5, 1.2, 4.2])
    assert [ledger.steps for ledger in quick] == [2, 7]
    quick.clear()
    for worse in (1.0, 2.0):
        said["end"] = worse
        np.testing.assert_allclose(mm.epsilon_curve(PLAIN, mixed_up, 1e-5), mixed_up)
    np.testing.assert_allclose(mm.epsilon_curve(PLAIN, mixed_up, 1e-5, by="renyi"), mixed_up)
    np.testing.assert_allclose(mm.epsilon_curve(PLAIN, mixed_up, 1e-5, by="classic"), 2 * mixed_up)
    assert mm.epsilon_curve(PLAIN, [], 1e-5).size == 0
    assert not quick
    for by, message in (("pld", "a curve is drawn by"), ("worst", "is unknown")):
        with pytest.raises(mm.ModelMixError, match=message):
            mm.epsilon_curve(PLAIN, [1], 1e-5, by=by)
