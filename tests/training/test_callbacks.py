"""Callbacks see a run at five moments, and public values only."""

from __future__ import annotations

import planned
import pytest
import torch
from torch import nn

import modelmix as mm
from modelmix.runs.folder import RunFolder

X, Y = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
PLAN = mm.Plan.of(mm.Mechanism(1.0, 0.5), 6, delta=1e-3)


class Notes(mm.Callback):
    def __init__(self):
        self.seen = []

    def note(self, moment, run):
        self.seen.append((moment, run.step))

    def on_start(self, run):
        self.note("start", run)

    def on_step(self, run):
        self.note("step", run)

    def on_checkpoint(self, run):
        self.note("checkpoint", run)

    def on_evaluate(self, run):
        self.note("evaluate", run)

    def on_finish(self, run):
        self.note("interrupted" if run.interrupted else "finish", run)


def trainer(callbacks, **more):
    torch.manual_seed(0)
    return planned.Trainer(
        nn.Linear(4, 2), nn.CrossEntropyLoss(), (X, Y), PLAN, 1.0, 0.1, callbacks=callbacks, seed=1, **more
    )


def test_the_moments_come_in_order(tmp_path):
    notes = Notes()
    run = trainer([notes], test_set=(X.clone(), Y.clone()), folder=tmp_path / "run")
    run.run(4, evaluate_every=2, progress=False)
    steps = [("step", 1), ("step", 2), ("checkpoint", 2), ("evaluate", 2)]
    more = [("step", 3), ("step", 4), ("checkpoint", 4), ("evaluate", 4)]
    assert notes.seen == [("checkpoint", 0), ("start", 0), *steps, *more, ("finish", 4)]


def test_what_is_seen_is_what_is_kept(tmp_path):
    """A state that is not kept is taken again with other noise if the process dies: nobody may have seen it."""
    seen = []

    class Looks(mm.Callback):
        def on_step(self, run):
            kept = RunFolder(tmp_path / "run").load_checkpoint()[0]["last"]
            seen.append((run.step, run.state.step, torch.equal(run.state.last, kept), len(run.metrics)))
            assert run.steps == 6
            assert run.until == 4
            assert run.folder == tmp_path / "run"
            assert set(run.state_dict()) == {"weight", "bias"}

    trainer([Looks()], folder=tmp_path / "run").run(4, evaluate_every=2, progress=False)
    assert seen == [(1, 0, True, 0), (2, 0, True, 0), (3, 2, True, 1), (4, 2, True, 1)]


def test_everybody_hears_of_the_end_and_nothing_kept_is_lost(tmp_path):
    class Stops(mm.Callback):
        def on_step(self, run):
            if run.step == 3:
                raise RuntimeError("enough")

        def on_finish(self, run):
            raise RuntimeError("at the end, too")

    notes = Notes()
    run = trainer([Stops(), notes], folder=tmp_path / "run")
    with pytest.raises(RuntimeError):
        run.run(progress=False)
    assert notes.seen[-1] == ("interrupted", 3)
    again = trainer([], folder=tmp_path / "run", resume=True)
    assert again.step == 3
    whole = trainer([]).run(progress=False)
    assert torch.equal(again.run(progress=False).state.last, whole.state.last)


def test_the_guarantee_is_the_plans():
    class Asks(mm.Callback):
        def on_step(self, run):
            self.epsilon, self.words = run.guarantee.epsilon, str(run)

    asks = Asks()
    trainer([asks]).run(2, progress=False)
    assert asks.epsilon == mm.epsilon(PLAN)
    assert asks.words.startswith("epsilon ")


@pytest.mark.parametrize("odd", [print, Notes, "bar"])
def test_what_is_no_callback_is_refused(odd):
    with pytest.raises(mm.ModelMixError, match=r"not a Callback|derive its class"):
        mm.RunOptions(callbacks=[odd])
