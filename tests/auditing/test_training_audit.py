"""Real runs of the trainer under attack: honest ones stay below their claim, and every mutation is caught."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import planned
import pytest
import torch
from torch import nn

import modelmix as mm
from modelmix.accounting.guarantee import guarantee
from modelmix.auditing.bounds import epsilon_lower_bound
from modelmix.auditing.training import attack
from modelmix.gradients.clip import Clip
from modelmix.training import randomness, rules, step
from modelmix.training.checkpoint import RunFiles
from modelmix.training.embedding import EmbeddingClip
from modelmix.training.sums import GradientSum

DELTA = 1e-2


def claim(mechanism, steps=1, delta=DELTA):
    return guarantee(mm.Ledger().add(mechanism, steps), delta).epsilon


def many(mechanism, runs, **options):
    seen = attack(mechanism, seed=0, **options)
    for seed in range(1, runs):
        seen += attack(mechanism, seed=seed, **options)
    return seen


HONEST = {
    "plain": (mm.Mechanism(1.0, 1.0), {}),
    "mix": (mm.Mechanism(0.7, 1.0, 2.0), {}),
    "mix, paper's padding": (mm.Mechanism(0.7, 1.0, 2.0), {"rule": mm.Rule(padding="paper")}),
    "mix, p": (mm.Mechanism(0.5, 1.0, 3.0, p=4), {}),
    "mix, Laplace": (mm.Mechanism(0.8, 1.0, 1.0, law="laplace"), {}),
    "alternate": (mm.Mechanism(0.7, 1.0, 2.0), {"rule": mm.Rule("alternate")}),
    "momentum": (mm.Mechanism(0.7, 1.0, 2.0), {"rule": mm.Rule(momentum=0.9)}),
    "subsampled": (mm.Mechanism(0.7, 0.5, 1.0), {}),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_runs_stay_below_their_claim(name):
    mechanism, options = HONEST[name]
    for steps in (1, 3):
        seen = many(mechanism, 4, canaries=700, steps=steps, **options)
        claimed = claim(mechanism, steps)
        assert seen.two_worlds(DELTA, confidence=0.9999).epsilon < claimed
        assert seen.one_run(1e-5, 500, confidence=0.9999).epsilon < claim(mechanism, steps, 1e-5)
        if name != "momentum":  # whose centre this attacker does not bother to work out
            assert seen.two_worlds(DELTA).epsilon > 0.1 * claimed


EMBEDDED = {
    "plain": mm.EmbeddingMechanism(1.3, 1.0),
    "mix": mm.EmbeddingMechanism(1.2, 1.0, 3.0),
    "mix, p": mm.EmbeddingMechanism(1.2, 1.0, 3.0, p=4),
    "subsampled": mm.EmbeddingMechanism(1.0, 0.5, 3.0),
}


@pytest.mark.parametrize("name", EMBEDDED)
def test_honest_embedded_runs_stay_below_their_claim(name):
    """And an attacker who knows the basis sees in the trainer what the simulated mechanism shows."""
    mechanism = EMBEDDED[name]
    seen = many(mechanism, 2, canaries=40, steps=40).each_step()
    found = seen.two_worlds(DELTA, confidence=0.9999).epsilon
    assert 0.1 * claim(mechanism) < found < claim(mechanism)
    # The mean of e^score is 1 without the canary if what is seen has the law that the attacker believes in.
    score = np.exp(seen.ratio()[~seen.present])
    assert abs(score.mean() - 1) < 5 * score.std() / np.sqrt(len(score))


def test_a_run_on_a_real_task():
    """A network that learns while canaries pull at its weights; one run, the bound that needs no independence."""
    torch.manual_seed(0)
    x = torch.randn(300, 20)
    y = (x[:, 0] > 0).long()
    network = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 2))
    mechanism = mm.Mechanism(0.6, 1.0, 1.0)
    seen = attack(mechanism, canaries=900, network=network, data=(x, y), steps=4)
    found = seen.one_run(1e-5, 300, score=seen.total()).epsilon
    assert 0.2 < found < claim(mechanism, 4, 1e-5)


# Mutations. Each must be caught: the bound is above the claim.


def test_noise_ten_per_cent_too_small(monkeypatch):
    honest = step.noise
    monkeypatch.setattr(step, "noise", lambda *arguments: 0.9 * honest(*arguments))
    mechanism = mm.Mechanism(1.0, 1.0)
    assert attack(mechanism, canaries=400, steps=300).each_step().two_worlds(DELTA).epsilon > claim(mechanism)


def test_embeddings_with_the_noise_of_residuals(monkeypatch):
    """Noise in units of c1 where c0 is meant: a slip of one letter."""
    honest = randomness.StepRandomness.gaussian

    def slip(self, label, *rest):
        return honest(self, label, *rest) * (0.4 if label == "embedding noise" else 1.0)

    monkeypatch.setattr(randomness.StepRandomness, "gaussian", slip)
    mechanism = EMBEDDED["plain"]
    seen = attack(mechanism, canaries=100, steps=100).each_step()
    assert seen.two_worlds(DELTA, score=seen.total()).epsilon > claim(mechanism)


def test_embeddings_twice_as_long_as_their_clip(monkeypatch):
    honest = EmbeddingClip.sum
    monkeypatch.setattr(EmbeddingClip, "sum", lambda *a: (2 * honest(*a)[0], honest(*a)[1]))
    mechanism = EMBEDDED["plain"]
    assert attack(mechanism, canaries=100, steps=100).each_step().two_worlds(DELTA).epsilon > claim(mechanism)


# Wide mixing and little noise: where the mixing is lost, only z is left.
WIDE, LARGE = mm.Mechanism(0.335, 1.0, 400.0), 0.1


def test_mixing_left_out_for_one_layer(monkeypatch):
    """The canaries sit in the layer that is not mixed; there only z is left."""
    honest = rules.padded_gap

    def forgetful(*arguments):
        gap = honest(*arguments)
        gap[:1000] = 0
        return gap

    monkeypatch.setattr(rules, "padded_gap", forgetful)
    with pytest.raises(mm.UnprovedError):
        attack(WIDE, canaries=10)
    monkeypatch.setattr(step, "_is_mixed", lambda *arguments: None)
    seen = many(WIDE, 4, canaries=1000, network=_pair_of_layers(), coordinates=torch.arange(1000))
    assert seen.two_worlds(LARGE, seen.total()).epsilon > claim(WIDE, delta=LARGE)


def _pair_of_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 500), nn.Linear(500, 2))  # 1,000 weights in the first layer


def test_the_sign_of_zero(monkeypatch):
    """Equal initial states and sign(0) = 0: the first step is not mixed at all."""

    def naive(last, previous, tau, padding):
        gap = last - previous
        return torch.where(gap.abs() < tau, torch.sign(gap) * tau, gap)

    monkeypatch.setattr(rules, "padded_gap", naive)
    with pytest.raises(mm.UnprovedError):
        attack(WIDE, canaries=10)
    monkeypatch.setattr(step, "_is_mixed", lambda *arguments: None)
    seen = many(WIDE, 4, canaries=1000)
    assert seen.two_worlds(LARGE, seen.total()).epsilon > claim(WIDE, delta=LARGE)


def test_truncation_of_the_batch_sum(monkeypatch):
    """A canary of one coordinate keeps its whole length c, where c/sqrt(p) was accounted for."""
    honest = Clip.sum

    def late(self, gradients, weights):
        whole = honest(replace(self, p=1), gradients, weights)
        bound = self.coordinate_bound * weights.sum()
        return replace(whole, total=whole.total.clamp(-bound, bound))

    mechanism = mm.Mechanism(0.5, 1.0, 10.0, p=10_000)
    claimed = claim(mechanism)
    seen = attack(mechanism, canaries=400, steps=50, width=1).each_step()
    assert seen.two_worlds(DELTA, seen.total()).epsilon < claimed
    monkeypatch.setattr(Clip, "sum", late)
    seen = attack(mechanism, canaries=400, steps=50, width=1).each_step()
    assert seen.two_worlds(DELTA, seen.total()).epsilon > claimed


class Pull(nn.Module):
    """The gradient of a sample is its input, far above the clip."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size, dtype=torch.float64))

    def forward(self, x):
        return 1e3 * (x * self.w).sum(1)


def _steps_of_one_world(present: bool, mechanism) -> np.ndarray:
    """Ten samples pull one way, the canary the other way; at q = 1 every step is a trial of its own."""
    x = torch.tensor([[1.0]] * 10 + [[-1.0 if present else 0.0]], dtype=torch.float64)
    plan = mm.Plan.of(mechanism, 700)
    run = planned.Trainer(
        Pull(1), lambda outputs, targets: outputs.sum(), (x, torch.zeros(11)), plan, 1.0, 1.0, seed=int(present)
    )
    states = [run.state.last.item()]
    for _ in range(700):
        run.run(1, progress=False)
        states.append(run.state.last.item())
    return np.diff(states) * 11  # minus the noisy sum of clipped gradients


def test_division_by_the_drawn_size(monkeypatch):
    """With the canary the mean of the others moves as well, so that its pull counts nearly twice."""
    monkeypatch.setattr(RunFiles, "measure", lambda self, test: None)  # the epsilon of each of 2,800 runs of one step
    mechanism = mm.Mechanism(1.0, 1.0)
    claimed = claim(mechanism)
    honest = GradientSum.__call__

    def by_drawn(self, *arguments):
        met = honest(self, *arguments)
        drawn = int((met.norms != 0).sum())  # a sample without gradient stands for one that is not there
        return replace(met, total=met.total * 11 / drawn)

    found = epsilon_lower_bound(*(_steps_of_one_world(present, mechanism) for present in (False, True)), DELTA)
    assert found.epsilon < claimed
    monkeypatch.setattr(GradientSum, "__call__", by_drawn)
    found = epsilon_lower_bound(*(_steps_of_one_world(present, mechanism) for present in (False, True)), DELTA)
    assert found.epsilon > claimed


def test_momentum_on_raw_noisy_gradients():
    """Forty steps: the sum of what is seen averages the mixing out, because every noisy gradient comes back."""
    mechanism, steps = mm.Mechanism(1.0, 1.0, 100.0), 40
    claimed = claim(mechanism, steps, LARGE)
    sound = many(mechanism, 6, canaries=600, steps=steps, rule=mm.Rule(momentum=0.9))
    assert sound.two_worlds(LARGE, sound.total()).epsilon < claimed
    raw = many(mechanism, 6, canaries=600, steps=steps, rule=planned.RawMomentum("released", momentum=0.9))
    assert raw.two_worlds(LARGE, raw.total()).epsilon > claimed


def test_a_reused_generator(monkeypatch):
    """The same noise in every step and a canary in some of them: the difference of two steps has no noise at all."""
    mechanism = mm.Mechanism(2.0, 0.5)
    claimed = claim(mechanism, 2)
    honest = randomness.StepRandomness.gaussian

    def difference(seen):
        return np.abs(seen.x[0] - seen.x[1]).sum(1)

    seen = many(mechanism, 3, canaries=800, steps=2)
    assert seen.two_worlds(DELTA, difference(seen)).epsilon < claimed
    frozen = randomness.Randomness(7).step()._key

    def always_the_same(self, label, count, device="cpu"):
        return honest(randomness.StepRandomness(frozen), label, count)

    monkeypatch.setattr(randomness.StepRandomness, "gaussian", always_the_same)
    seen = many(mechanism, 3, canaries=800, steps=2)
    assert seen.two_worlds(DELTA, difference(seen)).epsilon > claimed
