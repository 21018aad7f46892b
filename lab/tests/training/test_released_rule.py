"""The step of the authors' released code: what it does, and that it proves nothing."""

from __future__ import annotations

import pytest
import torch
from planned import Trainer
from torch import nn

import modelmix as mm
from modelmix.gradients.clip import Clip
from modelmix.training import Randomness
from modelmix.training.embedding import EmbeddingClip
from modelmix.training.rules import State
from modelmix.training.step import propose_step
from modelmix_lab.training.released import ReleasedRule

X = torch.tensor([[0.5, -1.0, 2.0], [0.0, 1.0, -1.0]], dtype=torch.float64)
LAST, PREVIOUS = [0.3, -1.0, 2.0, 0.0, 5.0], [0.1, -1.0, -2.0, 0.4, 4.9]
VELOCITY, TOTAL = [1.0, -2.0, 0.5, 3.0, -0.25], [1.0, -3.0, 0.0, 2.0, -0.5]
UNMIXED = [False, True, False, True, False]
CLIP, ETA, BATCH, WIDTH = 2.0, 0.3, 5.0, 1.5


def half_square(outputs, targets):
    return 0.5 * outputs.square().sum()


def vector(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("unmixed", [None, torch.tensor(UNMIXED)])
@pytest.mark.parametrize("padding", ["exact", "paper"])
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.6, 0.0), (0.6, 0.7)])
def test_a_step_coordinate_by_coordinate(unmixed, padding, momentum, decay):
    rule = ReleasedRule(padding=padding, momentum=momentum, weight_decay=decay, unmixed=unmixed)
    state = State(vector(LAST), vector(PREVIOUS), vector(VELOCITY))
    again, tau = Randomness(9).step(), WIDTH * CLIP / BATCH * ETA
    noises, alphas = (0.7 * again.gaussian("noise", 5)).tolist(), again.uniform("mixing", 5).tolist()
    new = propose_step(
        state, vector(TOTAL), Randomness(9).step(), rule=rule, mechanism=mm.Mechanism(0.7, 0.1, WIDTH), clip=CLIP,
        eta=ETA, expected_batch=BATCH,
    ).accepted()  # fmt: skip
    for j in range(5):
        alone = unmixed is not None and UNMIXED[j]
        gap = LAST[j] - PREVIOUS[j]
        if abs(gap) < tau:
            sign = 1 if gap >= 0 else -1
            gap = sign * tau if padding == "exact" else gap + sign * tau
        centre = LAST[j] if alone else (LAST[j] + PREVIOUS[j]) / 2
        centre -= ETA * decay * LAST[j] + ETA * momentum * VELOCITY[j]
        noisy = TOTAL[j] / BATCH + CLIP / BATCH * noises[j]
        wanted = centre - ETA * noisy + (0.0 if alone else (alphas[j] - 0.5) * gap)
        assert new.last[j].item() == pytest.approx(wanted, rel=1e-12)
        raw = momentum * VELOCITY[j] + noisy if momentum else VELOCITY[j]
        assert new.velocity[j].item() == pytest.approx(raw, rel=1e-12)


def test_momentum_is_the_raw_one_and_norm_layers_are_not_mixed():
    model = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 1)).double()
    rule = ReleasedRule.of(model, False, momentum=0.9)
    mechanism = mm.Mechanism(1e-3, 1.0, 2.0)
    trainer = Trainer(model, half_square, (X, torch.zeros(2)), mechanism, clip=1.0, lr=0.2, rule=rule, seed=4)
    before = trainer.state
    trainer.run(1, progress=False)
    moved = (trainer.state.last - before.last).abs()
    raw = trainer.state.velocity
    torch.testing.assert_close(trainer.state.last[:6], before.last[:6] - 0.2 * raw[:6])  # the norm layer
    assert float((moved[6:] - 0.2 * raw[6:].abs()).abs().min()) > 1e-4  # the rest is mixed
    with pytest.raises(mm.UnprovedError, match="momentum carries unmixed"):
        trainer.epsilon()


def test_what_it_breaks_is_said():
    assert any("fifteen draws" in reason for reason in ReleasedRule().unproved)
    assert any("residuals" in reason for reason in ReleasedRule(embedded=True).unproved)
    assert not any("residuals" in reason for reason in ReleasedRule().unproved)


def test_a_step_makes_fifteen_draws_and_an_embedded_one_a_single_draw():
    found, again = ReleasedRule().draw(Randomness(5).step(), 200, 0.6), Randomness(5).step()
    parts = [again.poisson_indices(f"sampling {i}", 200, 0.6 / 15) for i in range(15)]
    assert torch.equal(found, torch.cat(parts))
    one = ReleasedRule(embedded=True).draw(Randomness(5).step(), 200, 0.6)
    assert torch.equal(one, Randomness(5).step().poisson_indices("sampling", 200, 0.6))


def test_nothing_is_truncated():
    assert ReleasedRule().bound(Clip(2.0, 4)) == Clip(2.0)
    clip = ReleasedRule(embedded=True).bound(EmbeddingClip(1.0, 2.0, 4, 3.0))
    assert (clip.c0, clip.c1, clip.p, clip.c) == (1.0, 2.0, 1, float("inf"))


def test_an_embedded_run_of_the_authors_is_not_proved():
    x, y = torch.randn(20, 3, dtype=torch.float64), torch.zeros(20, dtype=torch.int64)
    model, embedding = nn.Linear(3, 2).double(), mm.Embedding((x[:8].clone(), y[:8].clone()), 4, groups=1)
    rule = ReleasedRule.of(model, True, momentum=0.9)
    run = Trainer(
        model, nn.CrossEntropyLoss(), (x, y), mm.EmbeddingMechanism(1.0, 0.5, 2.0), clip=1.0, lr=0.1, rule=rule,
        embedding=embedding,
    ).run(2, progress=False)  # fmt: skip
    assert any("not published" in reason for reason in run.ledger.unproved)
    with pytest.raises(mm.UnprovedError):
        run.epsilon(1e-5)
