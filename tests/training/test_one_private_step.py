"""There is one private step: the trainer, a loop of one's own and an audit release the same bits.

From the same key, data and plan. The step is driven by hand as well, with sums of clipped gradients that are computed
sample by sample.
"""

from __future__ import annotations

import numpy as np
import planned
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

import modelmix as mm
from modelmix.auditing.training import attack, implant
from modelmix.gradients import Batch, Engine
from modelmix.gradients.clip import Clip
from modelmix.gradients.parameters import FlatParameters
from modelmix.training.randomness import Randomness
from modelmix.training.rules import State
from modelmix.training.step import PrivateStep, RunAccount

N, STEPS, CLIP, ETA, SEED = 40, 4, 0.7, 0.25, 11
X = torch.randn(N, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % 3
PLANS = {
    "plain": mm.Ledger().add(mm.Mechanism(1.0, 0.3), STEPS),
    "mixed": mm.Ledger().add(mm.Mechanism(0.8, 0.3, 2.0), STEPS),
    "truncated": mm.Ledger().add(mm.Mechanism(0.8, 0.3, 2.0, p=4), STEPS),
    "Laplace": mm.Ledger().add(mm.Mechanism(0.9, 0.3, 1.0, law="laplace"), STEPS),
    "phases": mm.Ledger().add(mm.Mechanism(0.8, 0.3, 2.0), 2).add(mm.Mechanism(1.1, 0.3, 1.0), STEPS - 2),
}


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def plan_of(name):
    return mm.Plan.of(PLANS[name], delta=1e-3, population=N)


def by_trainer(name):
    run = planned.Trainer(
        network(), F.cross_entropy, (X, Y), plan_of(name), CLIP, ETA, seed=SEED,
        performance=mm.Performance(device="cpu", chunk=N),
    )  # fmt: skip
    states = []
    for _ in range(STEPS):
        states.append(run.run(1, progress=False).state.last)
    return states, run.ledger


def by_loop(name):
    model = network()
    model, optimizer, loader, criterion = planned.make_private(
        model, torch.optim.SGD(model.parameters(), lr=ETA), DataLoader(TensorDataset(X, Y), batch_size=12),
        nn.CrossEntropyLoss(), clip=CLIP, plan=plan_of(name), seed=SEED,
    )  # fmt: skip
    states = []
    while len(states) < STEPS:
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            states.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
            if len(states) == STEPS:
                break
    return states, optimizer.ledger


def by_hand(name):
    """The step itself, given sums that an engine takes over the draws that the step names."""
    model, plan = network(), plan_of(name)
    flat, engine = FlatParameters(model), Engine(model, F.cross_entropy, (X[:1], Y[:1]))
    engine.remember()
    mixed = plan.phases[0].mechanism.mixed
    step = PrivateStep(
        plan, mm.Rule("mix" if mixed else "plain"), CLIP, State.start(flat.read()), Randomness(SEED),
        RunAccount(plan.ledger.__class__(population=N, seeded=True), 0),
    )  # fmt: skip
    states = []
    for _ in range(STEPS):
        ((_, indices),) = step.coming(N, 1)
        batch = Batch(X[indices], Y[indices])
        total = engine(flat.views(step.state.last), batch, Clip.of(step.mechanism, CLIP)).total
        states.append(step.take(total, ETA).last)
    return states, step.account.ledger


@pytest.mark.parametrize("name", PLANS)
def test_trainer_loop_and_step_release_the_same_bits(name):
    (first, ledger), (second, of_loop), (third, of_step) = by_trainer(name), by_loop(name), by_hand(name)
    for k in range(STEPS):
        assert torch.equal(first[k], second[k]), f"step {k + 1} of the loop"
        assert torch.equal(first[k], third[k]), f"step {k + 1} by hand"
    assert ledger == of_loop
    assert ledger.phases == of_step.phases == PLANS[name].phases


def test_an_audit_watches_the_trainers_own_steps():
    mechanism, options = mm.Mechanism(0.8, 0.5, 2.0), {"canaries": 30, "steps": 3, "seed": 4}
    seen = attack(mechanism, **options)
    trainer, index, _ = implant(mechanism, **options)
    for k in range(3):
        before = trainer.state
        trainer.run(1, progress=False)
        moved = 0.5 * (before.last + before.previous) - trainer.state.last
        assert np.array_equal(seen.x[k], (moved / (0.1 / trainer.expected_batch))[index].numpy())
