"""What a ledger on disk counts as: a run counts as its plan, wherever and however it is read."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import modelmix as mm
from modelmix.accounting import runs
from modelmix.accounting.runs import Claim, claim_of, load_claim, plan_beside, read_config, read_object

A, B = mm.Mechanism(1.0, 0.1), mm.Mechanism(2.0, 0.1)
PLAN = mm.Plan.of(A, 100, population=500, delta=1e-3)
CONFIG = {"schema": "modelmix-run", "version": 2, "seed": None, "delta": 1e-3, "settings": {}, "plan": PLAN.as_dict()}


def taken(steps=10, mechanism=A, **claim):
    return mm.Ledger(**{"population": 500, **claim}).add(mechanism, steps)


def without(name, **more):
    return {key: value for key, value in {**CONFIG, **more}.items() if key != name}


def write(folder, config=CONFIG, ledger=None, name="ledger.json"):
    folder.mkdir(exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    (taken() if ledger is None else ledger).save(folder / name)
    return folder


# Claims.


def test_a_claim_says_when_more_was_planned_than_taken():
    assert Claim(taken(), taken()).notes == ()
    (note,) = Claim(taken(1000), taken(), "folder x").notes
    assert note == (
        "folder x: counted as its plan of 1,000 steps; 10 were taken (stopping early does not lower epsilon)."
    )
    assert Claim(taken(1000), taken()).notes[0].startswith("this run: ")


@pytest.mark.parametrize(("planned", "ran"), [(3.0, 1.0), (1.0, 3.0), (2.0, 2.0)])
def test_a_claim_is_never_below_the_steps_that_were_taken(monkeypatch, planned, ran):
    asked = []

    def cost(ledger, delta):
        asked.append(delta)
        return mm.Guarantee(planned if ledger.steps == 100 else ran, delta, "RDP", steps=ledger.steps)

    monkeypatch.setattr(runs, "guarantee", cost)
    found = Claim(taken(100), taken()).guarantee(1e-3)
    assert found == mm.Guarantee(max(planned, ran), 1e-3, "RDP", steps=100)
    assert set(asked) == {1e-3}


# What is read.


def test_a_ledger_file_alone_is_what_it_says(tmp_path):
    taken().save(tmp_path / "book.json")
    claim = load_claim(tmp_path / "book.json")
    assert (claim.ledger, claim.taken, claim.name) == (taken(), taken(), str(tmp_path / "book.json"))
    assert load_claim(str(tmp_path / "book.json")) == claim
    write(tmp_path / "other", {"model_type": "of another program"})
    assert load_claim(tmp_path / "other" / "ledger.json").ledger == taken()
    write(tmp_path / "run", name="book.json")
    assert load_claim(tmp_path / "run" / "book.json").ledger.steps == 100, "the run's own lines under another name"
    other = mm.Ledger().add(mm.Mechanism(7.0, 0.1), 3)
    other.save(tmp_path / "run" / "other.json")
    assert load_claim(tmp_path / "run" / "other.json").ledger == other, "not the ledger of the run beside it"
    write(tmp_path / "bare", None)
    assert load_claim(tmp_path / "bare" / "ledger.json").ledger == taken()


def test_a_run_counts_as_its_plan(tmp_path):
    folder = write(tmp_path / "run")
    link = tmp_path / "link.json"
    link.symlink_to(folder / "ledger.json")
    for place in (folder, folder / "ledger.json", link):
        claim = load_claim(place)
        assert claim == Claim(PLAN.ledger, taken(), str(place))
        assert claim.ledger.steps == 100


def test_a_folder_without_its_configuration_is_no_run(tmp_path):
    with pytest.raises(mm.ModelMixError, match=r"cannot read .*config.json: .*; give the folder of a run"):
        load_claim(write(tmp_path / "bare", None))
    with pytest.raises(mm.ModelMixError, match=r"cannot read .*ledger.json"):
        load_claim(tmp_path)
    with pytest.raises(mm.ModelMixError, match='its "schema" must be "modelmix-run"'):
        load_claim(write(tmp_path / "other", {"model_type": "of another program"}))


def test_a_ledger_of_a_loop_counts_as_the_plan_beside_it(tmp_path):
    path = tmp_path / "book.json"
    taken().save(path)
    assert plan_beside(path) == tmp_path / "book.json.plan"
    plan_beside(path).write_text(json.dumps(PLAN.as_dict()))
    (tmp_path / "link.json").symlink_to(path)
    for place in (path, tmp_path / "link.json"):
        assert load_claim(place) == Claim(PLAN.ledger, taken(), str(place))
    assert not load_claim(path).ledger.seeded
    taken(10, B).save(path)
    with pytest.raises(mm.ModelMixError, match=r"book.json: .* does not begin"):
        load_claim(path)
    plan_beside(path).write_text("[]")
    with pytest.raises(mm.ModelMixError, match="not a JSON object"):
        load_claim(path)


# What a configuration says.


@pytest.mark.parametrize(
    ("plan", "ledger"),
    [
        (PLAN, taken(101)),
        (PLAN, taken(10, B)),
        (PLAN, taken(population=499)),
        (PLAN, taken(population=None)),
        (PLAN, taken(population=None, populations=(500,))),
        (PLAN, taken(unit="person")),
        (PLAN, taken(adjacency="add-or-remove")),
        (replace(PLAN, population=None), taken()),
        (replace(PLAN, spent=taken(3, B)), taken()),
    ],
)
def test_a_plan_that_its_ledger_does_not_begin_is_refused(plan, ledger):
    with pytest.raises(mm.ModelMixError, match=r"run x: ledger.json does not begin what the plan"):
        claim_of({**CONFIG, "plan": plan.as_dict()}, ledger, "run x")


@pytest.mark.parametrize("steps", [1, 100])
def test_a_plan_that_its_ledger_begins_is_the_claim(steps):
    earlier = taken(3, B)
    plan = replace(PLAN, spent=earlier)
    claim = claim_of({**CONFIG, "plan": plan.as_dict()}, earlier.add(A, steps), "run x")
    assert claim == Claim(plan.ledger, earlier.add(A, steps), "run x")
    assert claim_of(CONFIG, taken(steps)).name == "this run"


@pytest.mark.parametrize("plan", [None, "a text", [], {}, {"phases": 3}])
def test_a_plan_that_cannot_be_read_is_refused(plan):
    with pytest.raises(mm.ModelMixError, match="not readable"):
        claim_of({**CONFIG, "plan": plan}, taken())


def test_only_runs_that_are_older_than_plans_have_none():
    old = taken(population=None)
    for config in (without("plan", version=1), {"seed": None}):
        assert claim_of(config, old) == Claim(old, old)
        with pytest.raises(mm.ModelMixError, match=r"run x has no plan in config.json"):
            claim_of(config, taken(), "run x")
    with pytest.raises(mm.ModelMixError, match="has no plan"):
        claim_of(without("plan"), old)


def test_seeds_and_broken_rules_are_never_forgotten():
    broken = replace(taken(), unproved=("a rule",))
    assert claim_of(CONFIG, broken).ledger.unproved == ("a rule",)
    assert not claim_of(CONFIG, taken()).ledger.seeded
    for config, ledger in (
        ({**CONFIG, "seed": 0}, taken()),
        (without("seed"), taken()),
        (CONFIG, taken(seeded=True)),
        ({**CONFIG, "plan": replace(PLAN, spent=taken(3, seeded=True)).as_dict()}, taken(3).add(A, 4)),
        (without("plan", version=1, seed=3), taken(population=None)),
    ):
        claim = claim_of(config, ledger)
        assert claim.ledger.seeded
        assert claim.taken is ledger


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (without("schema"), "schema"),
        (without("version"), "version None"),
        ({**CONFIG, "version": 0}, "version 0: this program reads versions 1 to 3"),
        ({**CONFIG, "version": 4}, "version 4"),
        ({**CONFIG, "version": True}, "version True"),
        ({**CONFIG, "version": 2.0}, "version 2.0"),
        (without("delta"), "config.json: delta = None"),
        ({**CONFIG, "delta": 1}, "config.json: delta = 1"),
        ({**CONFIG, "settings": []}, '"settings" must be an object'),
    ],
)
def test_a_configuration_that_is_not_one_is_refused(tmp_path, config, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(mm.ModelMixError, match=message):
        read_config(path)


def test_configurations_of_both_versions_are_read(tmp_path):
    path = tmp_path / "config.json"
    for config in (CONFIG, {**CONFIG, "version": 1}):
        path.write_text(json.dumps(config))
        assert read_config(path) == config
    path.write_text(json.dumps(without("settings")))
    assert read_config(path)["settings"] == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not whole JSON"),
        ('{"a": ', "is not whole JSON"),
        ("[" * 200_000, "nested too deeply"),
        ("3", "not a JSON object"),
        ("null", "not a JSON object"),
    ],
)
def test_a_file_that_is_no_object_is_refused(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(mm.ModelMixError, match=message):
        read_object(path)
    path.write_bytes(b"\xff")
    with pytest.raises(mm.ModelMixError, match="not whole JSON"):
        read_object(path)
    path.write_text('{"a": "é"}', encoding="utf-8")
    assert read_object(path) == {"a": "é"}
