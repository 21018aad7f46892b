"""Every phase of a plan runs its own noise, mixing width and sampling rate, seen from released states alone.

Given the released states, (centre - w_k)/eta - total/B in units of clip/B has the law of the phase's noise plus a
uniform as wide as the gap, max(|w_{k-1} - w_{k-2}|, tau). Both are known, so the distribution function of every
coordinate turns what was added into a uniform number on (0, 1). Kolmogorov and Smirnov's test judges them step by step;
its threshold gives a false alarm once in 10^6 steps, and the seeds are fixed, so the verdict is always the same.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from planned import Trainer
from scipy import stats
from torch import nn

import modelmix as mm

D, N = 20_000, 3
CLIP, ETA = 2.0, 0.25
FALSE_ALARM = 1e-6


def make_trainer(model, loss, data, plan: mm.Ledger, **options) -> mm.Trainer:
    """A trainer that runs the phases of a ledger; the only place that knows how a plan is given."""
    return Trainer(model, loss, data, plan, CLIP, ETA, **options)


def plan_of(*mechanisms: mm.Mechanism, steps: int = 2) -> mm.Ledger:
    plan = mm.Ledger()
    for mechanism in mechanisms:
        plan = plan.add(mechanism, steps)
    return plan


class Push(nn.Module):
    """The gradient of every sample is its own input."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return x @ self.w[:, None]


class Pick(nn.Module):
    """Sample i pulls at coordinate i alone, far above the clip."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))

    def forward(self, i):
        return 100 * self.w[i]


def total_loss(outputs, targets):
    return outputs.sum()


def cdf(mechanism: mm.Mechanism, x: np.ndarray, width: np.ndarray | float) -> np.ndarray:
    """P(noise + uniform of this width <= x), the width in units of the clip."""
    z = mechanism.noise_multiplier
    if mechanism.law == "gaussian":

        def integral(t):
            return t * stats.norm.cdf(t / z) + z * stats.norm.pdf(t / z)

        plain = stats.norm(scale=z).cdf
    else:

        def integral(t):
            return np.where(t < 0, 0.5 * z * np.exp(np.minimum(t, 0) / z), t + 0.5 * z * np.exp(-np.maximum(t, 0) / z))

        plain = stats.laplace(scale=z).cdf
    if np.all(width == 0):
        return plain(x)
    return (integral(x + width / 2) - integral(x - width / 2)) / width


def clipped_sum(x: torch.Tensor, mechanism: mm.Mechanism) -> torch.Tensor:
    norm = 1 if mechanism.law == "laplace" else 2
    each = CLIP * x.double() / torch.linalg.vector_norm(x.double(), ord=norm, dim=1, keepdim=True)
    bound = CLIP * mechanism.coordinate_bound
    return each.clamp(-bound, bound).sum(0)


def surprises(plan: mm.Ledger) -> list[float]:
    """For every step the statistic over its threshold: above 1 has the probability FALSE_ALARM."""
    torch.manual_seed(1)
    x = torch.randn(N, D)
    trainer = make_trainer(Push(D), total_loss, (x, torch.zeros(N)), plan, seed=7)
    mixing = any(phase.mechanism.mixed for phase in plan.phases)
    unit = CLIP / N  # q = 1: everybody is in every draw
    found = []
    for step in range(1, plan.steps + 1):
        mechanism = plan.mechanism_at(step)
        before = trainer.state
        trainer.run(1, progress=False)
        gap = (before.last - before.previous).numpy() / (unit * ETA)
        centre = 0.5 * (before.last + before.previous) if mixing else before.last
        added = ((centre - trainer.state.last) / ETA - clipped_sum(x, mechanism) / N) / unit
        width = np.maximum(np.abs(gap), mechanism.mixing_width) if mixing else 0.0
        distance = stats.ks_1samp(cdf(mechanism, added.numpy(), width), stats.uniform.cdf).statistic
        found.append(distance * math.sqrt(D) / math.sqrt(-0.5 * math.log(FALSE_ALARM / 2)))
    assert trainer.ledger.phases == plan.phases
    return found


BASE = mm.Mechanism(0.5, 1.0)
MIXED = mm.Mechanism(0.4, 1.0, 1.0)
PLANS = {
    "z": plan_of(BASE, replace(BASE, noise_multiplier=2.0), replace(BASE, noise_multiplier=0.8)),
    "z, mixed": plan_of(MIXED, replace(MIXED, noise_multiplier=1.2), replace(MIXED, noise_multiplier=0.7)),
    "omega": plan_of(MIXED, replace(MIXED, mixing_width=4.0), replace(MIXED, mixing_width=0.3)),
    "law": plan_of(MIXED, replace(MIXED, law="laplace")),
}


@pytest.mark.parametrize("field", PLANS)
def test_every_phase_adds_the_law_of_its_own_mechanism(field):
    assert max(surprises(PLANS[field])) < 1


@pytest.mark.parametrize("field", ["z", "z, mixed", "omega", "law"])
def test_a_phase_that_runs_as_the_first_one_is_seen(field, monkeypatch):
    """The judge itself: the ledger names every phase and the first one's mechanism is run."""
    from modelmix.training import step as module

    honest, first = module.propose_step, PLANS[field].phases[0].mechanism
    monkeypatch.setattr(module, "propose_step", lambda *a, **how: honest(*a, **{**how, "mechanism": first}))
    steps = PLANS[field].phases[0].steps
    found = surprises(PLANS[field])
    assert max(found[:steps]) < 1
    assert min(found[steps : 2 * steps]) > 1


def test_every_phase_clips_as_its_own_mechanism_says():
    """Next to no noise: a step moves by the mean of clipped gradients, truncated by p and in the norm of the law."""
    quiet = mm.Mechanism(1e-9, 1.0)
    plan = plan_of(quiet, replace(quiet, p=30), replace(quiet, law="laplace"), replace(quiet, p=100, law="laplace"))
    torch.manual_seed(1)
    x = 10 * torch.randn(N, 20) * torch.logspace(-2, 0, 20)  # all of them above the clip
    trainer = make_trainer(Push(20), total_loss, (x, torch.zeros(N)), plan, seed=2)
    sums = []
    for step in range(1, plan.steps + 1):
        before = trainer.state.last
        trainer.run(1, progress=False)
        sums.append(clipped_sum(x, plan.mechanism_at(step)))
        torch.testing.assert_close((before - trainer.state.last) * N / ETA, sums[-1], rtol=1e-5, atol=1e-6)
    assert all((a - b).abs().max() > 0.05 for a, b in zip(sums[1::2], sums[2::2], strict=False)), "the phases differ"


RATES = [0.1, 0.6, 0.3]
SAMPLES = 1200


def pickers(steps: int) -> tuple[mm.Ledger, mm.Trainer]:
    plan = plan_of(*(mm.Mechanism(1e-6, q) for q in RATES), steps=steps)
    data = torch.arange(SAMPLES), torch.zeros(SAMPLES)
    return plan, make_trainer(Pick(SAMPLES), total_loss, data, plan, seed=3)


def is_binomial(count: int, rate: float) -> bool:
    """Whether a count is within what a fair draw gives; wrong once in 10^6."""
    return min(stats.binom.cdf(count, SAMPLES, rate), stats.binom.sf(count - 1, SAMPLES, rate)) > FALSE_ALARM / 2


def test_every_phase_draws_at_its_own_rate_and_divides_by_its_own_batch():
    """A drawn sample moves its coordinate by eta * clip/B, B = q*n of this very step; the others stay."""
    plan, trainer = pickers(steps=2)
    for step in range(1, plan.steps + 1):
        q, before = plan.mechanism_at(step).sample_rate, trainer.state.last
        trainer.run(1, progress=False)
        moved = (before - trainer.state.last).numpy() / (ETA * CLIP / (q * SAMPLES))
        drawn = moved > 0.5
        np.testing.assert_allclose(moved, drawn, atol=1e-4)
        assert is_binomial(int(drawn.sum()), q), f"step {step}"
        assert trainer.expected_batch == q * SAMPLES


def test_phases_change_in_the_middle_of_one_run():
    """One call for three phases of one step: 1/B differs, so every sum of moves says which steps drew a sample."""
    plan, trainer = pickers(steps=1)
    before = trainer.state.last
    trainer.run(plan.steps, progress=False)
    moved = (before - trainer.state.last).numpy() / (ETA * CLIP)
    choices = np.array([[a, b, c] for a in (0, 1) for b in (0, 1) for c in (0, 1)])
    sums = choices @ (1 / (np.array(RATES) * SAMPLES))
    nearest = np.argmin(np.abs(moved[:, None] - sums), axis=1)
    np.testing.assert_allclose(moved, sums[nearest], rtol=1e-4, atol=1e-6)
    for count, q in zip(choices[nearest].sum(0), RATES, strict=True):
        assert is_binomial(int(count), q)


@pytest.mark.parametrize("field", ["omega", "z"])
def test_one_long_run_takes_the_steps_of_many_short_ones(field):
    plan = PLANS[field]
    torch.manual_seed(1)
    data = torch.randn(N, 50), torch.zeros(N)
    long, short = (make_trainer(Push(50), total_loss, data, plan, seed=2) for _ in range(2))
    long.run(plan.steps, progress=False)
    for _ in range(plan.steps):
        short.run(1, progress=False)
    assert torch.equal(long.state.last, short.state.last)
    assert torch.equal(long.state.previous, short.state.previous)
