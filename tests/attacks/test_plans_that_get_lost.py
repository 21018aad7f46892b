"""A run that was stopped counts as its plan, whichever way its lines are carried off."""

from __future__ import annotations

import contextlib
import shutil

import planned
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import modelmix as mm
from modelmix.training import random_labels

X, Y = torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 2
MECHANISM = mm.Mechanism(1.0, 0.5)
PLAN = mm.Plan.of(MECHANISM, 20, delta=1e-4)


def trainer(plan=PLAN, **more):
    torch.manual_seed(0)
    return planned.Trainer(nn.Linear(4, 2), nn.CrossEntropyLoss(), (X, Y), plan, 1.0, 0.1, **more)


def stopped_run(folder):
    return trainer(folder=folder).run(5, progress=False)


def stopped_loop(**options):
    model = nn.Linear(4, 2)
    loader = DataLoader(TensorDataset(X, Y), batch_size=30)
    model, optimizer, loader, criterion = planned.make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader, nn.CrossEntropyLoss(), clip=1.0,
        plan=options.pop("plan", PLAN), **options,
    )  # fmt: skip
    for (x, y), _ in zip(loader, range(2), strict=False):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    return optimizer


def test_lines_of_a_stopped_run_are_not_saved_elsewhere(tmp_path):
    run = stopped_run(tmp_path / "run")
    for ledger in (mm.Ledger.load(tmp_path / "run" / "ledger.json"), run.ledger, stopped_loop().ledger):
        with pytest.raises(mm.ModelMixError, match="planned more steps than it took"):
            ledger.save(tmp_path / "copy.json")
        with pytest.raises(mm.ModelMixError, match="planned more steps than it took"):
            mm.plan(noise_multiplier=1.0, samples=60, batch=30, steps=1, delta=1e-4, spent=ledger)
        with pytest.raises(mm.ModelMixError, match="planned more steps than it took"):
            mm.Ledger().then(ledger).save(tmp_path / "copy.json")
    assert not (tmp_path / "copy.json").exists()


def test_what_counts_can_be_given(tmp_path):
    run = stopped_run(tmp_path / "run")
    whole = mm.epsilon(PLAN)
    for spent in (run.plan.ledger, tmp_path / "run", stopped_loop().plan.ledger):
        plan = mm.Plan.of(MECHANISM, 1, delta=1e-4, spent=spent, population=60)
        assert plan.spent.steps == 20
        assert mm.epsilon(plan) > whole
    assert run.epsilon() == mm.epsilon(run.ledger, 1e-4) < whole  # the epsilon so far can be asked for
    done = trainer(mm.Plan.of(MECHANISM, 2, delta=1e-4)).run(progress=False)
    done.ledger.save(tmp_path / "done.json")
    assert mm.Ledger.load(tmp_path / "done.json").steps == 2


def test_a_ledger_that_was_renamed_within_its_run_counts_as_the_run(tmp_path):
    stopped_run(tmp_path / "run")
    shutil.copy(tmp_path / "run" / "ledger.json", tmp_path / "run" / "other.json")
    assert mm.load_claim(tmp_path / "run" / "other.json").ledger.steps == 20
    mm.Ledger().add(mm.Mechanism(5.0, 0.5), 3).save(tmp_path / "run" / "spent.json")  # of something else
    assert mm.load_claim(tmp_path / "run" / "spent.json").ledger.steps == 3


def test_the_plan_of_a_rule_that_breaks_the_proof_has_no_epsilon(tmp_path):
    run = trainer(mm.Plan.of(mm.Mechanism(1.0, 0.5, 2.0), 20, delta=1e-4), rule="released", folder=tmp_path / "run")
    with pytest.raises(mm.UnprovedError):
        mm.epsilon(run.plan)
    run.run(2, progress=False)
    again = trainer(
        mm.Plan.of(mm.Mechanism(1.0, 0.5, 2.0), 20, delta=1e-4), rule="released", folder=tmp_path / "run", resume=True
    )
    assert again.step == 2
    with pytest.raises(mm.UnprovedError):
        mm.epsilon(again.plan)


def test_a_loop_that_mixes_more_widely_than_planned_counts_as_planned(tmp_path):
    plan = mm.Plan.of(mm.Mechanism(1.0, 0.5, 2.0), 20, delta=1e-4, population=60)
    optimizer = stopped_loop(plan=plan, tau=1.0, ledger=tmp_path / "l.json")
    assert optimizer.ledger.phases[0].mechanism.mixing_width > 2.0
    claim = mm.load_claim(tmp_path / "l.json")
    assert (claim.ledger.steps, claim.taken.steps) == (20, 2)
    assert mm.epsilon(claim, 1e-4) == mm.epsilon(plan)


def test_a_loop_that_mixes_less_widely_than_planned_is_not_of_its_plan(tmp_path):
    wide = mm.Plan.of(mm.Mechanism(1.0, 0.5, 2.0), 20, delta=1e-4, population=60)
    stopped_loop(plan=wide, ledger=tmp_path / "l.json")
    mm.Ledger(population=60).add(mm.Mechanism(1.0, 0.5, 1.9), 2).save(tmp_path / "l.json")
    with pytest.raises(mm.ModelMixError, match="does not begin what the plan"):
        mm.load_claim(tmp_path / "l.json")


def test_training_samples_are_not_declared_public():
    with pytest.raises(mm.UnprovedError, match="the test set lies in the memory of the training samples"):
        trainer(test_set=(X[:30], Y[:30]), test_public=True)
    trainer(test_set=(X[:30], Y[:30]))  # for the data holder's eyes
    every = torch.cat([X, X]), torch.cat([Y, Y])
    data = tuple(t[:60] for t in every)
    planned.Trainer(
        nn.Linear(4, 2),
        nn.CrossEntropyLoss(),
        data,
        PLAN,
        1.0,
        0.1,
        test_set=tuple(t[60:] for t in every),
        test_public=True,
    )  # fmt: skip, other rows of one array
    with pytest.raises(mm.UnprovedError, match="the public set lies in the memory of the training samples"):
        trainer(
            mm.Plan.of(mm.EmbeddingMechanism(1.0, 0.5), 3, delta=1e-4),
            embedding=mm.Embedding((X[:20], random_labels(20, 2)), 4, groups=1),
        )


def test_a_state_that_fails_to_load_adds_no_step_to_the_plan(tmp_path):
    """What another loop ran was counted, the load failed, and one more step was taken: five of four."""
    plan = mm.Plan.of(MECHANISM, 4, delta=1e-4, population=60)

    def made(width):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))
        loader = DataLoader(TensorDataset(X, Y), batch_size=30)
        return planned.make_private(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loader, nn.CrossEntropyLoss(), clip=1.0, plan=plan
        )

    def go(model, optimizer, loader, criterion):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()

    other = made(3)
    while other[1].ledger.steps < 4:
        go(*other)
    for width in (5, 3):
        loop = made(width)
        state = other[1].state_dict()
        if width == 3:
            state["param_groups"] = state["param_groups"] * 2  # torch's optimizer refuses it, after all of our checks
        with pytest.raises((mm.ModelMixError, ValueError)):
            loop[1].load_state_dict(state)
        with contextlib.suppress(mm.BudgetExceeded):
            for _ in range(5):
                go(*loop)
        assert loop[1].ledger.steps <= 4


class Everybody(mm.Rule):
    def draw(self, draws, count, rate):
        return torch.arange(count)


class Declared(Everybody):
    unproved = ("everybody is in every draw",)


def test_a_rule_of_ones_own_proves_nothing():
    for rule in (Everybody("plain"), Declared("plain")):
        with pytest.raises(mm.UnprovedError):
            stopped_loop(rule=rule)
    with pytest.raises(mm.UnprovedError, match="a rule of your own"):
        trainer(rule=Everybody("plain"))
    run = trainer(rule=Declared("plain"))
    with pytest.raises(mm.UnprovedError):
        _ = run.guarantee
    with pytest.raises(mm.UnprovedError):
        mm.epsilon(run.plan)


def test_what_a_run_says_of_itself_is_not_given_from_outside(tmp_path):
    loud = mm.Plan.of(mm.Mechanism(9.0, 0.5), 20, delta=1e-4, population=60)
    run = trainer(folder=tmp_path / "run", about={"plan": loud.as_dict(), "population": 7})
    run.run(2, progress=False)
    assert mm.epsilon(mm.load_claim(tmp_path / "run"), 1e-4) == mm.epsilon(PLAN)


def test_a_plan_is_not_extended_while_its_run_goes_on(tmp_path):
    class Extends(mm.Callback):
        def on_step(self, run):
            run._run.extend(5)

    with pytest.raises(mm.ModelMixError, match="a run is going on"):
        trainer(folder=tmp_path / "run", callbacks=[Extends()]).run(2, progress=False)


@pytest.mark.parametrize(
    "options",
    [{"test_public": "no"}, {"resume": 1}, {"about": "x"}, {"engine": 3}, {"callbacks": mm.Callback()}],
    ids=["test_public", "resume", "about", "engine", "callbacks"],
)
def test_options_have_types(options):
    with pytest.raises(mm.ModelMixError):
        mm.RunOptions(**options)


def test_live_ledgers_are_no_plans_and_no_claims(tmp_path):
    run = stopped_run(tmp_path / "run")
    with pytest.raises(mm.ModelMixError, match="planned more steps"):
        mm.Plan.of(run.ledger, delta=1e-4)
