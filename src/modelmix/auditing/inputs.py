"""The black-box view: canaries are inputs, and the attacker sees the final model only.

Random inputs with random labels are put into the training data by a fair coin. What the model has learned of one can
only come from its having been there, so the attacker bets on those whose loss is low. One run, many canaries, and the
bound that needs no independence between them. It is far below the white-box bounds; it shows what a user of the model
sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelmix._checks import whole
from modelmix.accounting.adjacency import ADD_OR_REMOVE
from modelmix.accounting.mechanism import Mechanism
from modelmix.accounting.plan import Plan
from modelmix.auditing.bounds import LowerBound, one_run_lower_bound
from modelmix.training.options import RunOptions
from modelmix.training.trainer import Trainer


def random_inputs(like: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Noise of the shape, type and range of the data's inputs; nothing of their content."""
    shape = (count, *like.shape[1:])
    if like.is_floating_point():
        return torch.randn(shape, generator=generator, dtype=like.dtype)
    return torch.randint(0, 256, shape, generator=generator).to(like.dtype)


def audit_inputs(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    classes: int,
    mechanism: Mechanism,
    delta: float,
    *,
    steps: int,
    clip: float,
    lr: float,
    canaries: int = 500,
    guesses: int | None = None,
    confidence: float = 0.95,
    seed: int = 0,
    loss: Callable[[Any, Any], Tensor] = nn.functional.cross_entropy,
    **options: Any,
) -> LowerBound:
    """A lower bound on epsilon from the final model of one run.

    Args:
        model, data, classes: the task.
        mechanism, steps, clip, lr, options: the run, as for ``Trainer``.
        canaries: random inputs with random labels, each put in with probability one half.
        guesses: on the half of them with the lowest and the half with the highest loss; None guesses a fifth.
    """
    canaries = whole("canaries", canaries, "the number of canaries", least=10)
    guesses = canaries // 5 if guesses is None else whole("guesses", guesses, "the number of guesses", least=2)
    generator = torch.Generator().manual_seed(seed)
    x, y = random_inputs(data[0], canaries, generator), torch.randint(classes, (canaries,), generator=generator)
    present = np.random.default_rng(seed).random(canaries) < 0.5
    there = torch.from_numpy(present)
    # The coins move the number of samples: scales come from a constant that does not.
    population = len(data[0]) + canaries
    plan = Plan.of(mechanism, steps, delta=min(delta, 0.1 / population), population=population, adjacency=ADD_OR_REMOVE)
    train_set = (torch.cat([data[0], x[there]]), torch.cat([data[1], y[there]]))
    trainer = Trainer(model, loss, train_set, plan, clip, lr, options=RunOptions(seed=seed), **options)
    trainer.run(progress=False)
    with torch.no_grad():
        device = next(trainer.model.parameters()).device
        each = nn.functional.cross_entropy(trainer.model(x.to(device)), y.to(device), reduction="none").cpu().numpy()
    order = np.argsort(each, kind="stable")
    low, high = order[: guesses - guesses // 2], order[canaries - guesses // 2 :]
    correct = int(np.sum(present[low]) + np.sum(~present[high]))
    return one_run_lower_bound(canaries, guesses, correct, delta, confidence)
