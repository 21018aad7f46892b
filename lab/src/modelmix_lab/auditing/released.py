"""The authors' released configuration under attack. It claims an epsilon that nobody proved; this is what it leaks.

Two of its habits are attacked separately. Norm layers are not mixed: a gradient concentrated there meets the Gaussian
noise alone. Momentum runs on unmixed noisy gradients: every one of them comes back in later steps, and a sum over the
steps averages the mixing out.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelmix.accounting.laws import Gaussian
from modelmix.accounting.mechanism import Mechanism
from modelmix.auditing.bounds import Array, LowerBound, epsilon_lower_bound
from modelmix.auditing.mechanism import canary_size, log_ratio
from modelmix.auditing.training import implant
from modelmix.training.rules import Rule, State, midpoint
from modelmix.training.step import propose_step
from modelmix_lab.training.released import ReleasedRule

MOMENTUM = 0.9


class NormLayer(nn.Module):
    """A norm layer that nothing but canaries pulls at."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], 2)


def norm_layer_scores(mechanism: Mechanism, *, canaries: int, steps: int, seed: int) -> tuple[Array, Any]:
    """Scores of canaries of one coordinate in a norm layer: n_k = v_k - mu v_{k-1} is seen with noise z alone."""
    network = NormLayer(math.ceil(canaries / 2))
    trainer, index, present = implant(
        mechanism,
        canaries=canaries,
        steps=steps,
        network=network,
        width=1,
        seed=seed,
        rule=ReleasedRule.of(network, False, momentum=MOMENTUM),
    )
    law, q = Gaussian(mechanism.noise_multiplier), mechanism.sample_rate
    unit = 0.1 / trainer.expected_batch
    score = np.zeros(canaries)
    velocity = torch.zeros_like(trainer.state.last)
    for _ in range(steps):
        before = trainer.state.last
        trainer.run(1, progress=False)
        moved = (before - trainer.state.last) / unit
        x = (moved - MOMENTUM * velocity)[index].cpu().numpy()
        velocity = moved
        ratio = log_ratio(law, x, 1.0)[:, 0]
        score += np.logaddexp(math.log1p(-q), math.log(q) + ratio) if q < 1 else ratio
    return score, present


class FastDraws:
    """Draws of a step from torch's own generator: quick, on any device, and for attacks only."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def gaussian(self, label: str, count: int, device: torch.device) -> Tensor:
        return torch.randn(count, generator=self._generator, device=device, dtype=torch.float64)

    def uniform(self, label: str, count: int, device: torch.device) -> Tensor:
        return torch.rand(count, generator=self._generator, device=device, dtype=torch.float64)


def momentum_scores(
    mechanism: Mechanism, *, canaries: int, steps: int, seed: int, rule: Rule | None = None, device: str = "cpu"
) -> tuple[Array, Any]:
    """Scores where everything is mixed and truncated and only the momentum is raw: the sum of all that is seen.

    The trainer's own steps on canaries of the worst case, p coordinates of c/sqrt(p) each; no network in between.
    """
    k = mechanism.worst_gradient[0][1]
    size, q = canary_size(mechanism, k), mechanism.sample_rate
    generator = torch.Generator(device).manual_seed(seed)
    present = torch.rand(canaries, generator=generator, device=device) < 0.5
    zero = torch.zeros(canaries * k, dtype=torch.float64, device=device)
    state = State.start(zero)
    rule = rule or ReleasedRule(momentum=MOMENTUM)
    score = torch.zeros(canaries, dtype=torch.float64, device=device)
    for _ in range(steps):
        drawn = present & (torch.rand(canaries, generator=generator, device=device) < q)
        total = (size * drawn.double()).repeat_interleave(k)
        draws: Any = FastDraws(generator)
        step = propose_step(state, total, draws, rule=rule, mechanism=mechanism, clip=1.0, eta=1.0, expected_batch=1.0)
        new = step.accepted()
        score += (midpoint(state.last, state.previous) - new.last).reshape(canaries, k).sum(1)
        state = new
    return score.cpu().numpy(), present.cpu().numpy()


def audit_released(
    mechanism: Mechanism, delta: float, which: str, *, canaries: int, steps: int, runs: int, seed: int = 0
) -> LowerBound:
    """A lower bound on what the configuration leaks through "norm" layers or through "momentum" alone."""
    attack_once = {"norm": norm_layer_scores, "momentum": momentum_scores}[which]
    found = [attack_once(mechanism, canaries=canaries, steps=steps, seed=seed + i) for i in range(runs)]
    score, present = np.concatenate([s for s, _ in found]), np.concatenate([p for _, p in found])
    return epsilon_lower_bound(score[~present], score[present], delta)
