"""What an adversary made ledgers, run folders and commands claim, and may not."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import modelmix as mm
from modelmix.accounting.runs import load_claim
from modelmix.cli import main
from modelmix.config.recipe import Recipe
from modelmix.runs.page import render
from modelmix.runs.page_data import read_run

QUIET, LOUD = mm.Mechanism(0.5, 0.01), mm.Mechanism(50.0, 0.01)
DELTA = 1e-5


@pytest.fixture
def run(capsys):
    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        out = capsys.readouterr()
        return int(end.value.code or 0), out.out, out.err

    return call


def a_run(folder: Path, planned: mm.Plan, ledger: mm.Ledger, **config: Any) -> Path:
    """A run folder as the trainer leaves it."""
    folder.mkdir(parents=True)
    said = {"schema": "modelmix-run", "version": 2, "seed": None, "delta": planned.delta, "settings": {}}
    said |= {"plan": planned.as_dict(), **config}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in said.items() if v != "gone"}))
    ledger.save(folder / "ledger.json")
    return folder


def book(steps: int = 100, mechanism: mm.Mechanism = QUIET, **claim: Any) -> mm.Ledger:
    return mm.Ledger(**{"population": 5000, **claim}).add(mechanism, steps)


def stopped(folder: Path, **config: Any) -> Path:
    """A run of 50 of 1,000 planned steps."""
    return a_run(folder, mm.Plan.of(QUIET, 1000, population=5000), book(50), **config)


@pytest.mark.parametrize("command", [["compare"], ["curve", "--out", "curve.png"], ["epsilon"]])
@pytest.mark.parametrize("as_json", [False, True])
def test_no_command_prints_an_epsilon_of_a_broken_rule(run, tmp_path, monkeypatch, command, as_json):
    monkeypatch.chdir(tmp_path)
    book(unproved=("momentum before mixing",)).save("broken.json")
    code, out, err = run(*command, "--ledger", "broken.json", *(["--json"] if as_json else []))
    assert (code, out) == (2, "")
    assert "momentum before mixing" in err
    assert not list(tmp_path.glob("curve*"))


@pytest.mark.parametrize("command", [["compare"], ["curve", "--out", "curve.png"], ["epsilon"]])
def test_every_command_says_for_whom_and_that_it_is_seeded(run, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    book(unit="person", population=50_000, seeded=True).save("seeded.json")
    code, out, _ = run(*command, "--ledger", "seeded.json")
    assert code == 0
    said = " ".join(out.split())
    assert "the contribution of one person is removed (zero-out; the number of samples, 50,000, is public)" in said
    assert "Seeded: for tests only" in said
    assert "delta = 1e-05 is large for n = " in said
    found = json.loads(run(*command, "--ledger", "seeded.json", "--json")[1])
    assert (found["unit"], found["population"], found["seeded"]) == ("person", 50_000, True)
    code, out, _ = run(*command, "--population", 5000, "--z", 1, "--q", 0.01, "--steps", 20)
    assert code == 0
    assert "every scale comes from the public constant 5,000" in " ".join(out.split())


def test_compare_takes_the_claim_of_a_ledger():
    found = mm.compare(book(unit="person"), DELTA).mechanism
    assert (found.unit, found.population) == ("person", 5000)
    with pytest.raises(mm.UnprovedError):
        mm.compare(book(unproved=("a rule",)), DELTA)
    with pytest.raises(mm.ModelMixError, match="one phase"):
        mm.compare(book().add(LOUD, 1), DELTA)


# The delta of another relation.


@pytest.mark.parametrize("mechanism", [mm.Mechanism(4.0, 1.0), mm.Mechanism(1.0, 0.01), mm.Mechanism(1.0, 0.05, 3.0)])
def test_delta_and_epsilon_of_replacing_agree(run, mechanism):
    given = {"steps": 50, "adjacency": "replace-one"}
    epsilon = mm.epsilon(mechanism, DELTA, **given)
    delta = mm.delta(mechanism, epsilon, **given)
    assert 0.97 * DELTA < delta <= DELTA * (1 + 1e-2)
    assert delta > 3 * mm.delta(mechanism, epsilon, steps=50)
    options = ["--z", mechanism.noise_multiplier, "--q", mechanism.sample_rate, "--omega", mechanism.mixing_width]
    asked = ["--steps", 50, "--adjacency", "replace-one", "--for-epsilon", epsilon, "--json"]
    assert json.loads(run("epsilon", *options, *asked)[1])["delta_for_epsilon"] == delta


def test_delta_of_replacing_knows_its_relation():
    assert mm.delta(QUIET, 0.0, steps=10**6, adjacency="replace-one") == 1
    assert mm.delta(mm.Mechanism(1.0, 1.0, law="laplace"), 2.001, steps=1, adjacency="replace-one") == 0
    with pytest.raises(mm.ModelMixError, match="give a population"):
        mm.delta(book(), 1.0, adjacency="add-or-remove")


# The plan of another run.


@pytest.mark.parametrize(
    "change",
    [
        {"plan": mm.Plan.of(LOUD, 101, population=5000).as_dict()},
        {"plan": mm.Plan.of(QUIET, 40, population=5000).as_dict()},
        {"plan": mm.Plan.of(QUIET, 1000, population=400).as_dict()},
        {"plan": mm.Plan.of(QUIET, 1000, population=5000, unit="person").as_dict()},
        {"plan": mm.Plan.of(QUIET, 1000, population=5000, adjacency="add-or-remove").as_dict()},
        {"plan": "gone"},
        {"plan": "gone", "version": 1},
        {"plan": None},
        {"plan": "a text"},
        {"plan": {}},
        {"plan": {"phases": 3}},
    ],
    ids=["quieter", "shorter", "population", "unit", "adjacency", "gone", "older", "null", "text", "empty", "odd"],
)
def test_a_plan_that_is_not_of_the_run_is_refused_everywhere(run, tmp_path, change):
    folder = stopped(tmp_path / "run", **change)
    for command in (
        ["verify", folder],
        ["verify", folder / "ledger.json"],
        ["report", folder],
        ["epsilon", "--ledger", folder / "ledger.json"],
        ["compare", "--ledger", folder],
        ["audit", folder, "--quick"],
    ):
        code, out, err = run(*command)
        assert (code, out) == (2, ""), command
        assert re.search("plan", err), command
    with pytest.raises(mm.ModelMixError, match="plan"):
        Recipe.load(_recipe(tmp_path, folder)).privacy.before()


def _recipe(place: Path, spent: Path) -> Path:
    path = place / "recipe.toml"
    given = '[privacy]\nkind = "plain"\nepsilon = 50\nbatch = 50\nsteps = 10\n'
    path.write_text(f"{given}spent = {json.dumps(str(spent))}\n")
    return path


def test_a_run_that_stopped_counts_as_its_plan_at_every_door(run, tmp_path):
    folder = stopped(tmp_path / "run")
    plan = mm.epsilon(mm.Ledger().add(QUIET, 1000), DELTA)
    assert plan > 1.2 * mm.epsilon(mm.Ledger().add(QUIET, 50), DELTA)
    (tmp_path / "link.json").symlink_to(folder / "ledger.json")
    for place in (folder, folder / "ledger.json", tmp_path / "link.json"):
        assert load_claim(place).guarantee(DELTA).epsilon == plan
        assert json.loads(run("verify", place, "--json")[1])["epsilon"] == plan
        for command in ("epsilon", "compare"):
            assert json.loads(run(command, "--ledger", place, "--json")[1])["epsilon"] == plan
            assert "counted as its plan of 1,000 steps; 50 were taken" in run(command, "--ledger", place)[1]
        assert Recipe.load(_recipe(tmp_path, place)).privacy.before().steps == 1000
    report = re.sub("<[^>]*>", " ", render(read_run(folder)))
    assert f"{math.ceil(plan * 1e4) / 1e4:.4f}" in report
    elsewhere = tmp_path / "ledger.json"
    book(50).save(elsewhere)
    assert json.loads(run("verify", elsewhere, "--json")[1])["epsilon"] < plan
    (tmp_path / "config.json").write_text('{"model_type": "of another program"}')
    assert json.loads(run("verify", elsewhere, "--json")[1])["epsilon"] < plan


def test_an_audit_attacks_what_ran_and_compares_with_the_plan(run, tmp_path):
    mechanism = mm.Mechanism(2.0, 1.0)
    folder = a_run(tmp_path / "run", mm.Plan.of(mechanism, 20, population=500), book(2, mechanism, population=500))
    found = json.loads(run("audit", folder, "--trials", 200, "--quick", "--json", "--out", tmp_path / "a.png")[1])
    assert found["audits"][0]["claimed"] == mm.epsilon(mechanism, DELTA, steps=20)
    assert "2 steps" in found["audits"][0]["what"]
    assert load_claim(folder).notes


def test_an_older_run_without_a_plan_is_read_as_before(run, tmp_path):
    folder = a_run(tmp_path / "run", mm.Plan.of(QUIET, 1000), book(50, population=None), version=1, plan="gone")
    assert load_claim(folder).ledger == book(50, population=None)
    assert run("verify", folder)[0] == 0


@pytest.mark.parametrize("where", ["config", "spent"])
def test_seeding_known_to_one_file_is_said(run, tmp_path, where):
    if where == "config":
        folder = stopped(tmp_path / "run", seed=7)
    else:
        earlier = book(10, LOUD, seeded=True)
        plan = mm.Plan.of(QUIET, 1000, population=5000, spent=earlier)
        folder = a_run(tmp_path / "run", plan, book(10, LOUD).then(book(50)))
    assert json.loads(run("verify", folder, "--json")[1])["seeded"] is True
    assert "eeded: for tests only" in run("epsilon", "--ledger", folder)[1]
    assert "for tests only" in render(read_run(folder))


def test_never_less_than_the_steps_that_were_taken(tmp_path, monkeypatch):
    """Whatever an accountant says of the plan."""
    from modelmix.accounting import runs

    def odd(ledger: mm.Ledger, delta: float) -> mm.Guarantee:
        return mm.Guarantee(5.0 if ledger.steps == 50 else 1.0, delta, "RDP")

    monkeypatch.setattr(runs, "guarantee", odd)
    assert load_claim(stopped(tmp_path / "run")).guarantee(DELTA).epsilon == 5


# Populations.


def test_populations_are_all_remembered_whichever_comes_first():
    many, few = book(population=200_000), book(population=1000)
    for joined in (many.then(few), few.then(many)):
        assert (joined.population, joined.populations) == (None, (1000, 200_000))
        assert mm.Ledger.from_json(joined.to_json()) == joined
        assert joined.then(few).populations == (1000, 200_000)
        with pytest.raises(mm.ModelMixError, match="below 1/200000"):
            mm.guarantee(joined, DELTA)
        assert "is public" in mm.guarantee(joined, 1e-6).scope
        assert "1,000" not in mm.guarantee(joined, 1e-6).scope
    both = [book(population=n, adjacency="add-or-remove") for n in (2000, 1000)]
    scopes = {mm.guarantee(a.then(b), DELTA).scope for a, b in (both, both[::-1])}
    assert len(scopes) == 1
    assert not re.search("1,000|2,000", scopes.pop())
    unknown = book(population=None)
    for joined in (unknown.then(few), few.then(unknown)):
        assert (joined.population, joined.populations) == (None, (1000,))
    with pytest.raises(mm.ModelMixError, match="several populations"):
        mm.Ledger(population=3, populations=(4,))


def test_a_report_checks_delta_against_the_population(run, tmp_path):
    plan = mm.Plan.of(QUIET, 100, population=5000)
    folder = a_run(tmp_path / "run", plan, book(100), delta=1e-3)
    for command in (["report", folder], ["verify", folder, "--delta", 1e-3]):
        code, _, err = run(*command)
        assert code == 2
        assert "below 1/5000" in err
    with pytest.raises(mm.ModelMixError, match="below 1/5000"):
        mm.epsilon(book(), 1e-3)


# Texts.


@pytest.mark.parametrize(
    "unit", ["sample[/]", "person[conceal]", "a" * 31, "2 samples", "", "one\n", "sample is safe. Truly", " sample", 3]
)
def test_a_unit_is_a_word(unit):
    with pytest.raises(mm.ModelMixError, match="30 letters"):
        mm.Ledger(unit=unit)


def test_units_of_two_words_are_words():
    assert mm.Ledger(unit="hospital-stay of A2").unit == "hospital-stay of A2"


def test_nothing_that_is_printed_is_markup(capsys):
    from modelmix.cli import show

    show.table("a [title]", ["b [red]", "c"], [["d [/]", "[conceal]1"]], ["note [conceal]kept :smile:"])
    out = capsys.readouterr().out
    for said in ("a [title]", "b [red]", "d [/]", "[conceal]1", "note [conceal]kept :smile:"):
        assert said in out


# Plans.


def test_a_plan_of_a_ledger_claims_what_the_ledger_claims():
    plan = mm.Plan.of(book(adjacency="add-or-remove", unit="person"), delta=DELTA)
    assert (plan.adjacency, plan.unit, plan.population) == ("add-or-remove", "person", 5000)
    assert mm.Plan.of(book(adjacency="add-or-remove"), adjacency="zero-out").adjacency == "zero-out"
    assert mm.Plan.of(book(population=None), population=70).population == 70
    for more in ({"adjacency": "add-or-remove"}, {"unit": "person"}, {"population": 6000}, {"population": None}):
        with pytest.raises(mm.ModelMixError, match="cannot claim more"):
            mm.Plan.of(book(), **more)
    for odd, message in (
        (book(seeded=True), "seeded"),
        (book().then(book(population=7)), "several populations"),
        (book(unproved=("a rule",)), "a rule"),
    ):
        with pytest.raises(mm.ModelMixError, match=message):
            mm.Plan.of(odd)


def test_a_target_is_kept_wherever_a_plan_is_used():
    plan = mm.Plan.of(QUIET, 100, target=0.1, population=5000)
    for use in (plan.guarantee, lambda: mm.guarantee(plan), lambda: mm.epsilon(plan), lambda: plan.bound_to(5000)):
        with pytest.raises(mm.BudgetExceeded, match=r"was made for 0\.1"):
            use()
    with pytest.raises(mm.BudgetExceeded):
        mm.Plan.of(QUIET, 100, target=0.1).bound_to(5000)
    assert mm.epsilon(plan, 1e-7) > 0.1  # another question


def test_endless_plans_are_compared_at_once():
    plan = mm.Plan.of(QUIET, 10**12, population=5000)
    assert plan.extended(1).extends(plan)
    assert not plan.extends(plan.extended(1))
    halves = mm.Ledger((*book(5 * 10**11).phases, *book(5 * 10**11).phases), population=5000)
    assert book(10**12).starts_with(halves)
    assert halves.starts_with(book(10**12))
    assert not halves.starts_with(book(10**12).add(LOUD, 1))
    assert not halves.starts_with(book(10**11).add(LOUD, 1))


# Replacing a unit.


@pytest.mark.parametrize("q", [1.0, 0.999999, 0.5])
def test_replacing_never_costs_more_with_wider_mixing(q):
    costs = [
        mm.epsilon(mm.Mechanism(2.0, q, omega), DELTA, steps=5, adjacency="replace-one")
        for omega in (0.0, 1e-3, 0.1, 1.0, 5.0, 20.0)
    ]
    assert math.isfinite(costs[0])
    assert all(later <= before * (1 + 1e-3) for before, later in pairwise(costs)), costs


def test_poor_sampling_costs_no_more_than_none():
    exact = mm.epsilon(mm.Mechanism(0.4, 1.0), DELTA, steps=3, adjacency="replace-one")
    for q in (0.999999, 0.9):
        found = mm.guarantee(mm.Mechanism(0.4, q), DELTA, steps=3, adjacency="replace-one")
        assert found.epsilon <= exact * (1 + 1e-9)
    assert found.epsilon >= mm.epsilon(mm.Mechanism(0.4, 0.9), DELTA, steps=3)


# What is printed beside a number, and at which delta.


@pytest.mark.filterwarnings("ignore:Creating legend")  # on a machine that is busy
@pytest.mark.parametrize("as_json", [False, True])
def test_an_audit_prints_all_that_its_claim_says(run, tmp_path, monkeypatch, as_json):
    """A seeded ledger of persons was audited as one of samples without a seed."""
    monkeypatch.chdir(tmp_path)
    book(20, mm.Mechanism(2.0, 1.0), unit="person", population=1237, seeded=True).save("seeded.json")
    given = ["--quick", "--trials", 50, "--out", "a.png", *(["--json"] if as_json else [])]
    code, out, _ = run("audit", "seeded.json", *given)
    assert code == 0
    said = " ".join(out.split())
    for line in (
        "the contribution of one person is removed (zero-out; the number of samples, 1,237",
        "eeded: for tests",
    ):
        assert line in said
    if as_json:
        found = json.loads(out)
        assert found["claim"]["epsilon"] == found["audits"][0]["claimed"]
    for delta in (0.9, 0.005):
        code, _, err = run("audit", "seeded.json", "--delta", delta, *given)
        assert code == 2
        assert "is not allowed" in err


@pytest.mark.filterwarnings("ignore:Creating legend")  # on a machine that is busy
def test_an_audit_of_a_stopped_run_claims_its_plan(run, tmp_path):
    mechanism = mm.Mechanism(2.0, 1.0)
    plan = mm.Plan.of(mechanism, 20, population=500)
    folder = a_run(tmp_path / "run", plan, book(2, mechanism, population=500), test_public=False, seed=3)
    out = run("audit", folder, "--trials", 50, "--quick", "--out", tmp_path / "a.png")[1]
    for line in ("metrics on the test set", "eeded: for tests", "counted as its plan of 20 steps"):
        assert line in " ".join(out.split())


def test_delta_is_limited_where_no_population_is_known(run):
    code, out, err = run("epsilon", "--z", 5, "--q", 0.1, "--steps", 10, "--delta", 0.02)
    assert (code, out) == (2, "")
    assert "above 0.01" in err


def test_a_constant_is_not_printed_as_the_number_of_samples(run):
    """--population 5000 --adjacency zero-out: "the number of samples, 5,000, is public"."""
    asked = ["--z", 1, "--q", 0.01, "--steps", 100, "--population", 5000, "--adjacency"]
    for adjacency in ("zero-out", "replace-one"):
        out = " ".join(run("epsilon", *asked, adjacency)[1].split())
        assert "the number of samples is public" in out
        assert "5,000" not in out
        assert json.loads(run("epsilon", *asked, adjacency, "--json")[1])["population"] is None
    constant = book(adjacency="add-or-remove")
    for joined in (constant.then(book()), book().then(constant)):
        assert (joined.adjacency, joined.population, joined.populations) == ("zero-out", None, (5000,))
