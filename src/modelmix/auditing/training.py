"""Whole training runs under attack: canaries whose gradients are the worst case, in a real run of the trainer.

Every canary is a sample that pulls at coordinates of its own, so hard that it is always clipped, and is put in or left
out by a fair coin. The attacker sees all the released states (white box) and scores every canary by the likelihood
ratio that the mechanism claims. Whatever is broken on the way from the draw to the state, sampling, clipping, division,
noise, mixing, momentum, generators, shows in the scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from modelmix._checks import whole
from modelmix.accounting.embedding import EmbeddingMechanism
from modelmix.accounting.mechanism import Mechanism
from modelmix.accounting.plan import Plan
from modelmix.auditing.bounds import Array, LowerBound, epsilon_lower_bound, one_run_lower_bound
from modelmix.auditing.mechanism import log_likelihood_ratio, parts, worst_width
from modelmix.errors import ModelMixError
from modelmix.training.embedding import Embedding
from modelmix.training.options import RunOptions
from modelmix.training.trainer import Trainer

_PULL = 1e3  # times the clip


class Implanted(nn.Module):
    """A network whose weights can be pulled at by canaries."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self._trained = [name for name, p in network.named_parameters() if p.requires_grad]

    def forward(self, x: Tensor, index: Tensor, kind: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = torch.cat([attrgetter(name)(self.network).flatten() for name in self._trained])
        return self.network(x), flat[index].sum(-1), kind


class Bare(nn.Module):
    """A vector of weights that nothing but canaries pulls at."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], 2)


def implanted_loss(outputs: tuple[Tensor, Tensor, Tensor], targets: Tensor) -> Tensor:
    """The network's loss for a real sample, the pull for a canary, nothing for one that was left out."""
    scores, pull, kind = outputs
    real = F.cross_entropy(scores, targets)
    return torch.where(kind[0] == 0, real, kind[0].clamp_min(0) * pull[0])


@dataclass(frozen=True)
class Observed:
    """What the attacker sees of the canaries of some runs.

    ``x`` is steps x canaries x coordinates: (centre - w_k)/eta in units of clip/B, whose law the mechanism claims;
    ``present`` says which canaries were there.
    """

    mechanism: Mechanism
    x: Array
    present: NDArray[np.bool_]

    def ratio(self) -> Array:
        """The log-likelihood ratio of every canary, as the mechanism claims it: the best score if the claim is true."""
        q = self.mechanism.sample_rate
        ratio = log_likelihood_ratio(parts(self.mechanism, self.x.shape[2]), self.x)
        return np.asarray(np.sum(ratio if q == 1 else np.logaddexp(math.log1p(-q), math.log(q) + ratio), axis=0))

    def total(self) -> Array:
        """The sum of everything seen: what momentum on unmixed gradients leaks into."""
        return np.asarray(np.sum(self.x, axis=(0, 2)))

    def two_worlds(self, delta: float, score: Array | None = None, confidence: float = 0.95) -> LowerBound:
        """The bound for canaries that share nothing: coordinates, noise and coins are independent."""
        score = self.ratio() if score is None else score
        return epsilon_lower_bound(score[~self.present], score[self.present], delta, confidence)

    def one_run(
        self, delta: float, guesses: int | None = None, score: Array | None = None, confidence: float = 0.95
    ) -> LowerBound:
        """The bound of Steinke, Nasr and Jagielski, which needs no independence: the clearest cases are guessed."""
        score = self.ratio() if score is None else score
        m = len(score)
        guesses = m if guesses is None else whole("guesses", guesses, "the number of guesses", least=1)
        order = np.argsort(score, kind="stable")
        low, high = order[: guesses // 2], order[m - (guesses - guesses // 2) :]
        correct = int(np.sum(~self.present[low]) + np.sum(self.present[high]))
        return one_run_lower_bound(m, guesses, correct, delta, confidence)

    def each_step(self) -> Observed:
        """Every step as a trial of its own: what a single step leaks, canaries being in every draw or in none."""
        steps, count, width = self.x.shape
        return replace(self, x=self.x.reshape(1, steps * count, width), present=np.tile(self.present, steps))

    def __add__(self, other: Observed) -> Observed:
        return replace(
            self, x=np.concatenate([self.x, other.x], 1), present=np.concatenate([self.present, other.present])
        )


def implant(
    mechanism: Mechanism,
    *,
    canaries: int,
    steps: int = 1,
    network: nn.Module | None = None,
    data: tuple[Tensor, Tensor] | None = None,
    coordinates: Tensor | None = None,
    width: int | None = None,
    clip: float = 1.0,
    lr: float = 0.1,
    seed: int = 0,
    **options: Any,
) -> tuple[Trainer, Tensor, NDArray[np.bool_]]:
    """A trainer with canaries in its data, the coordinates of each of them, and which are there.

    Args:
        mechanism, steps: what the run claims, for how many steps.
        network, data: a real task; left out, a bare vector of weights that only canaries pull at.
        coordinates: the weights canaries may pull at, as indices into the flat vector; None is all of them.
        width: coordinates of one canary; None takes the worst case of the proof. Where gradients are embedded, public
            samples pull at the first half of those of every canary, so that these are the basis.
        options: for the trainer (rule, momentum, padding, ...).
    """
    k = worst_width(mechanism) if width is None else whole("width", width, "a canary's coordinates", least=1)
    rng = np.random.default_rng(seed)
    x, y = data if data is not None else (torch.zeros(0, 1), torch.zeros(0, dtype=torch.long))
    model = Implanted(Bare(canaries * k) if network is None else network)
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    places = torch.arange(count) if coordinates is None else coordinates
    if len(places) < canaries * k:
        raise ModelMixError(f"{canaries} canaries need {canaries * k} coordinates, and there are {len(places)}.")
    index = places[torch.from_numpy(rng.permutation(len(places))[: canaries * k])].reshape(canaries, k)
    present = rng.random(canaries) < 0.5
    n = len(x)
    inputs = (
        torch.cat([x, x.new_zeros(canaries, *x.shape[1:])]),
        torch.cat([torch.zeros(n, k, dtype=torch.long), index]),
        torch.cat([torch.zeros(n), torch.where(torch.from_numpy(present), _PULL * clip, -1.0)]),
    )
    targets = torch.cat([y, y.new_zeros(canaries)])
    if isinstance(mechanism, EmbeddingMechanism):
        basis = index[:, : k // 2].flatten()
        pulls = x.new_zeros(len(basis), *x.shape[1:]), basis[:, None].expand(-1, k).clone(), torch.ones(len(basis))
        options["embedding"] = Embedding((pulls, y.new_zeros(len(basis))), len(basis), groups=1)
    plan = Plan.of(mechanism, steps, delta=min(1e-5, 0.1 / len(targets)))
    trainer = Trainer(
        model, implanted_loss, (inputs, targets), plan, clip, lr, options=RunOptions(seed=seed), **options
    )
    return trainer, index, present


def attack(mechanism: Mechanism, *, canaries: int = 2000, steps: int = 1, **options: Any) -> Observed:
    """One run of the trainer with canaries, as the attacker sees it; options as in ``implant``."""
    clip, lr = options.get("clip", 1.0), options.get("lr", 0.1)
    trainer, index, present = implant(mechanism, canaries=canaries, steps=steps, **options)
    seen = []
    for _ in range(steps):
        before = trainer.state
        trainer.run(1, progress=False)
        centre = 0.5 * (before.last + before.previous) if mechanism.mixed else before.last
        unit = lr * clip / trainer.expected_batch
        seen.append(((centre - trainer.state.last) / unit)[index].cpu().numpy())
    return Observed(mechanism, np.stack(seen), present)
