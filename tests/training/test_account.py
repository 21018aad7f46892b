"""A run's ledger epsilon is the epsilon of the same numbers, by the library and by the command line."""

from __future__ import annotations

import json

import pytest
import torch
from planned import Trainer
from torch import nn

import modelmix as mm
from modelmix.gradients import Engine
from modelmix.gradients.clip import Clip
from modelmix.training.augment import AUGMENTATIONS

N = 200
X, Y = torch.randn(N, 5, generator=torch.Generator().manual_seed(0)), torch.arange(N) % 2


def trainer(mechanism, lr=0.1, **options) -> Trainer:
    return Trainer(nn.Linear(5, 2), nn.CrossEntropyLoss(), (X, Y), mechanism, 0.5, lr, seed=1, **options)


@pytest.mark.parametrize(
    "mechanism",
    [
        mm.Mechanism(1.1, 0.1, 2.0, p=4),
        mm.Mechanism(1.1, 0.1),
        mm.Mechanism(1.1, 0.1, 2.0, law="laplace"),
    ],
)
def test_epsilon_of_a_run(mechanism, run):
    t = trainer(mechanism).run(17, progress=False)
    numbers = ["--z", 1.1, "--q", 0.1, "--omega", mechanism.mixing_width, "--p", mechanism.p, "--law", mechanism.law]
    code, out, _ = run("epsilon", *numbers, "--steps", 17, "--delta", 1e-6, "--json")
    assert code == 0
    assert t.epsilon(1e-6) == json.loads(out)["epsilon"] == mm.epsilon(mechanism, 1e-6, steps=17)


def test_epsilon_over_schedules_of_tau_and_eta(run, tmp_path):
    """omega_k = (tau_k/eta_k) B/c, phase by phase, checked on the command line in the paper's units."""
    t = trainer(
        mm.Ledger().add(mm.Mechanism(0.9, 0.1), 12),
        lr=mm.Schedule.pieces({1: 0.1, 5: 0.05}),
        tau=mm.Schedule.pieces({1: 0.004, 8: 0.002}),
        folder=tmp_path / "run",
    ).run(12, progress=False)
    book = tmp_path / "book.json"
    for steps, tau, eta in ((4, 0.004, 0.1), (3, 0.004, 0.05), (5, 0.002, 0.05)):
        extra = ["--ledger", book] if book.exists() else []
        units = ["--clip", 0.5, "--n", N, "--q", 0.1, "--tau", tau, "--eta", eta]
        code, out, error = run("epsilon", "--z", 0.9, *units, "--steps", steps, *extra, "--save-ledger", book, "--json")
        assert code == 0, error
    assert t.epsilon(1e-5) == json.loads(out)["epsilon"]
    code, out, _ = run("verify", tmp_path / "run", "--json")
    assert code == 0
    assert t.epsilon(1e-5) == json.loads(out)["epsilon"]
    assert [phase.steps for phase in t.ledger.phases] == [4, 3, 5]


def test_a_plan_of_phases_is_run_as_it_is_written():
    plan = mm.Ledger().add(mm.Mechanism(1.0, 0.1, 1.0), 3).add(mm.Mechanism(2.0, 0.2, 0.5, p=4), 2)
    t = trainer(plan).run(2, progress=False).run(3, progress=False)
    assert t.ledger.phases == plan.phases
    assert t.epsilon() == mm.epsilon(plan, 1e-5)


def test_every_step_clips_as_its_phase_says(monkeypatch):
    plan = mm.Ledger().add(mm.Mechanism(1.0, 0.1, 1.0), 2).add(mm.Mechanism(2.0, 0.2, 0.5, p=4), 1)
    right, clips = Engine.__call__, []

    def watched(engine, *arguments):
        clips.append(arguments[2])
        return right(engine, *arguments)

    monkeypatch.setattr(Engine, "__call__", watched)
    trainer(plan, performance=mm.Performance(chunk=N)).run(3, progress=False)
    assert clips == [Clip(0.5), Clip(0.5), Clip(0.5, 4)]


def test_a_step_that_is_in_the_ledger_is_not_taken_with_another_mechanism():
    t = trainer(mm.Mechanism(1.0, 0.1))
    t._step.account.add(1, mm.Mechanism(1.0, 0.1))
    with pytest.raises(mm.UnprovedError, match="the mechanism that its ledger line names"):
        t._step.account.add(1, mm.Mechanism(0.5, 0.1))
    assert t.ledger.phases == mm.Ledger().add(mm.Mechanism(1.0, 0.1)).phases


def test_epsilon_grows_with_every_step_and_starts_at_zero():
    t = trainer(mm.Mechanism(1.0, 0.1, 1.0))
    seen = [t.epsilon()]
    for _ in range(4):
        seen.append(t.run(1, progress=False).epsilon())
    assert seen[0] == 0
    assert seen == sorted(set(seen))


def test_performance_knobs_do_not_touch_the_account_nor_the_result():
    mechanism = mm.Mechanism(1.0, 0.3, 1.0, p=2)
    torch.manual_seed(0)
    start = nn.Linear(5, 2).state_dict()
    results = []
    for knobs in ({}, {"chunk": 1}, {"chunk": 7}, {"engine": "vmap"}, {"engine": "loop", "chunk": 3}):
        model = nn.Linear(5, 2)
        model.load_state_dict(start)
        t = Trainer(
            model, nn.CrossEntropyLoss(), (X, Y), mechanism, 0.5, 0.2, seed=1, performance=mm.Performance(**knobs)
        ).run(4, progress=False)
        results.append(t)
    for t in results[1:]:
        assert t.ledger == results[0].ledger
        torch.testing.assert_close(t.state.last, results[0].state.last, rtol=1e-5, atol=1e-6)


def test_the_copies_of_a_sample_are_averaged_before_clipping(monkeypatch):
    """Two copies with opposite gradients cancel; clipped one by one they would not have to."""
    x = torch.tensor([[3.0]])
    signs = torch.tensor([1.0, -1.0])

    def opposite(inputs, generator):
        return inputs * signs.repeat(len(inputs) // 2)[:, None]

    monkeypatch.setitem(AUGMENTATIONS, "opposite", opposite)  # one of ours is given all rows of a chunk
    model = nn.Linear(1, 1, bias=False)
    t = Trainer(
        model,
        lambda outputs, targets: outputs.mean(),
        (x, torch.zeros(1)),
        mm.Mechanism(1e-9, 1.0),
        clip=1.0,
        lr=1.0,
        augment=opposite,
        multiplicity=2,
        seed=1,
    )
    before = t.state.last
    t.run(1, progress=False)
    torch.testing.assert_close(t.state.last, before, rtol=0, atol=1e-7)
    assert t.ledger.steps == 1
