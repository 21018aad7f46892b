"""What was released before training counts first."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from planned import Trainer
from torch import nn

import modelmix as mm
from modelmix.accounting.ledger import Ledger
from modelmix.errors import ModelMixError, UnprovedError
from modelmix.training import Performance

RELEASE = mm.Mechanism(8.0, 1.0)
STEP = mm.Mechanism(1.0, 0.2, mixing_width=2.0)


def make(folder=None, spent=None, plan=STEP, **more):
    torch.manual_seed(0)
    data = torch.randn(60, 4), torch.randint(0, 3, (60,))
    knobs = {"seed": 1, "performance": Performance(device="cpu"), "folder": folder, **more}
    return Trainer(nn.Linear(4, 3), F.cross_entropy, data, plan, 1.0, 0.5, spent=spent, **knobs)


def test_epsilon_is_that_of_everything():
    spent = Ledger().add(RELEASE, 2)
    trainer = make(spent=spent)
    assert trainer.epsilon(1e-5) == pytest.approx(mm.epsilon(spent, 1e-5))
    trainer.run(3, progress=False)
    assert trainer.step == 3
    assert trainer.ledger.phases == spent.add(STEP, 3).phases
    assert trainer.epsilon(1e-5) == mm.epsilon(spent.add(STEP, 3), 1e-5)
    alone = make().run(3, progress=False)
    assert torch.equal(alone.state.last, trainer.state.last)  # it changes the account and nothing else


def test_the_same_mechanism_before_and_during_training():
    trainer = make(spent=Ledger().add(STEP, 2), plan=Ledger().add(STEP, 3))
    trainer.run(3, progress=False)
    assert trainer.ledger.phases == Ledger().add(STEP, 5).phases
    with pytest.raises(ModelMixError, match="past the end"):
        trainer.run(1, progress=False)


def test_a_run_is_resumed_with_what_was_spent_and_not_without(tmp_path):
    spent = Ledger().add(RELEASE, 2)
    whole = make(tmp_path / "whole", spent).run(4, progress=False)
    make(tmp_path / "cut", spent).run(2, progress=False)
    for other in (None, Ledger().add(RELEASE, 1)):
        with pytest.raises(ModelMixError, match="another plan"):
            make(tmp_path / "cut", other, resume=True)
    again = make(tmp_path / "cut", spent, resume=True)
    assert again.step == 2
    again.run(2, progress=False)
    assert again.ledger == whole.ledger == mm.load_claim(tmp_path / "cut").taken
    assert torch.equal(again.state.last, whole.state.last)


def test_a_ledger_that_lost_a_line_is_refused(tmp_path):
    spent = Ledger().add(RELEASE, 2)
    make(tmp_path, spent).run(2, progress=False)
    for wrong in (spent.add(STEP, 1), Ledger().add(RELEASE, 1).add(STEP, 3)):
        wrong.save(tmp_path / "ledger.json")
        with pytest.raises(ModelMixError, match="restore ledger"):
            make(tmp_path, spent, resume=True)


def test_what_is_not_proved_cannot_come_first():
    with pytest.raises(UnprovedError):
        make(spent=Ledger(Ledger().add(RELEASE).phases, ("a rule was broken",)))
