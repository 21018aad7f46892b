"""Where to clip: from samples that need no protection, or from a noisy histogram that a ledger pays for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from shlex import quote

import numpy as np
import torch
from torch import Tensor, nn

from modelmix._checks import check_delta, positive, whole
from modelmix.accounting.adjacency import ADD_OR_REMOVE, ZERO_OUT
from modelmix.accounting.calibration import calibrate
from modelmix.accounting.guarantee import Guarantee, guarantee
from modelmix.accounting.ledger import Ledger, append_to_ledger
from modelmix.accounting.runs import plan_beside
from modelmix.errors import ModelMixError, UnprovedError
from modelmix.gradients import Loss
from modelmix.gradients.parameters import FlatParameters
from modelmix.theory import nonconvex
from modelmix.theory.clipping import Bias, NormHistogram, histogram
from modelmix.theory.kappa import TailFit, fit_tail
from modelmix.training.norms import gradient_statistics, private_norm_histogram
from modelmix.training.randomness import Randomness

TOLERATED = 0.1
"""The bias that is tolerated, as a share of the gradient (private data: of the mean norm)."""
_CLIPS = 25

Samples = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class HistogramBudget:
    """What a noisy histogram of private gradient norms may cost, and which ledger pays for it.

    Args:
        epsilon: of this release alone.
        ledger: the file that it is charged to, before anything is computed; it is made or continued.
        delta: failure probability.
        sample_rate: share of the samples that is drawn, by Poisson sampling.
        population: a public constant in place of the number of samples, which then stays private.
    """

    epsilon: float
    ledger: str | Path
    delta: float = 1e-5
    sample_rate: float = 0.1
    population: int | None = None


@dataclass(frozen=True)
class LossConstants:
    """Constants of the loss and of the training to come, for the second condition of Theorem 3.2."""

    smoothness: float
    loss_range: float
    epsilon: float
    delta: float = 1e-5


@dataclass(frozen=True)
class ClipAdvice:
    """A clip, and what it was chosen by.

    Args:
        clip: the smallest one whose bias is at most ``TOLERATED`` of the gradient, or the threshold if that is smaller.
        threshold: what Theorem 3.2 needs to promise convergence.
        kappa: tail constant of the sampling noise; for private samples a bound on it.
        histogram: of per-sample gradient norms; noisy for private samples.
        tail: of the sampling noise; None for private samples.
        bias: of clipping, at several clips; empty for private samples.
        guarantee: of the release of the histogram; None for public samples.
        coordinates: number of trained coordinates.
    """

    clip: float
    threshold: float
    kappa: float
    histogram: NormHistogram
    tail: TailFit | None
    bias: Sequence[Bias]
    guarantee: Guarantee | None
    coordinates: int


def advise_clip(
    model: nn.Module,
    criterion: Loss,
    data: Samples,
    *,
    public: bool = False,
    budget: HistogramBudget | None = None,
    constants: LossConstants | None = None,
    samples: int = 1000,
    seed: int = 0,
) -> ClipAdvice:
    """Advise a clip from the norms of per-sample gradients at the weights of a model.

    Private samples are used through a histogram of their gradient norms with Gaussian noise alone, and the ledger line
    is on disk before it is made; give the ledger to the training as ``spent``. The weights of the model must be public
    or released.

    Args:
        data: inputs and targets.
        public: the samples need no protection: they are looked at without noise, and nothing is charged.
        budget: what private samples pay, and from which ledger.
        constants: for the second condition of the threshold.
        samples: how many public samples are looked at.
        seed: of the choice of public samples.

    Raises:
        UnprovedError: neither are the samples public, nor is there a budget.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> data = torch.randn(200, 5), torch.arange(200) % 3
    >>> advice = advise_clip(nn.Linear(5, 3), nn.CrossEntropyLoss(), data, public=True)
    >>> 0 < advice.clip <= advice.threshold
    True
    """
    if not public and budget is None:
        raise UnprovedError(
            "a choice made by looking at private data is paid for",
            "gradient norms would be looked at, and nothing says that these samples are public.",
            "Give public=True if they need no protection, or a budget that pays for a noisy histogram.",
        )
    if public and budget is not None:
        raise ModelMixError("a budget pays for private samples: leave it out, or leave out public.")
    tail: TailFit | None = None
    bias: Sequence[Bias] = []
    spent: Guarantee | None = None
    size, count = FlatParameters(model).size, len(data[1])
    if budget is not None:
        norms, spent = _release(model, criterion, data, budget)
        kappa, count = norms.kappa(), budget.population or count
    else:
        norms, tail, bias = _look(model, criterion, data, samples, seed)
        kappa = tail.kappa
    threshold = _threshold(kappa, constants, count, size)
    return ClipAdvice(_advised(norms, bias, threshold), threshold, kappa, norms, tail, bias, spent, size)


def _look(
    model: nn.Module, criterion: Loss, data: Samples, samples: int, seed: int
) -> tuple[NormHistogram, TailFit, Sequence[Bias]]:
    samples = whole("samples", samples, "the number of samples", least=100)
    chosen = torch.randperm(len(data[1]), generator=torch.Generator().manual_seed(seed))[:samples]
    part = data[0][chosen], data[1][chosen]
    few = gradient_statistics(model, criterion, (part[0][:100], part[1][:100]), [1.0])
    middle = float(np.median(few.norms))
    clips = np.geomspace(middle / 30, 30 * middle, _CLIPS).tolist()
    found = gradient_statistics(model, criterion, part, clips)
    return histogram(found.norms), fit_tail(found.noise, seed=seed), found.bias


def _release(
    model: nn.Module, criterion: Loss, data: Samples, budget: HistogramBudget
) -> tuple[NormHistogram, Guarantee]:
    """The noisy histogram; its phase is on disk before the histogram is used."""
    known, ledger = budget.population is None, Path(budget.ledger)
    many = len(data[1]) if known else whole("population", budget.population, "the population", least=1)
    claim = Ledger(adjacency=ZERO_OUT if known else ADD_OR_REMOVE, population=many)
    check_delta(budget.delta, claim.populations)
    mechanism = calibrate(epsilon=budget.epsilon, delta=budget.delta, sample_rate=budget.sample_rate, steps=1)

    def charged(before: Ledger | None) -> Ledger:
        _refuse_kept(ledger)
        spent = (before or Ledger()).then(claim.add(mechanism, 1))
        spent.require_proof()
        return spent

    _refuse_kept(ledger)  # also before its folder is made
    append_to_ledger(ledger, charged)  # first: a look that is not in the ledger must not happen
    release = private_norm_histogram(model, criterion, data, mechanism, Randomness())
    return release.histogram, guarantee(claim.add(mechanism, 1), budget.delta)


def _refuse_kept(ledger: Path) -> None:
    """Refuse the ledger that a run or a loop keeps: its plan says what it costs, and it would no longer match it."""
    for place in (ledger, Path(os.path.realpath(ledger))):
        if place.is_dir() or place.with_name("config.json").exists() or plan_beside(place).exists():
            raise ModelMixError(
                f"{ledger} belongs to a run or a loop, which would no longer match it: write what it counts as into a "
                f"new file, modelmix epsilon --ledger {quote(str(ledger))} --save-ledger FILE, and give that file."
            )


def _threshold(kappa: float, constants: LossConstants | None, n: int, d: int) -> float:
    """4 kappa log 10, and the second condition of the proof where its constants are given."""
    if constants is None:
        return 4 * kappa * log(10)
    budget = nonconvex.Budget(
        n, d, 1.0, positive("train-epsilon", constants.epsilon, "the training's epsilon"), constants.delta, 1.0,
        positive("beta", constants.smoothness, "the smoothness"),
        positive("range", constants.loss_range, "the range of the loss"),
    )  # fmt: skip
    return nonconvex.threshold(kappa, budget.scale)


def _advised(norms: NormHistogram, bias: Sequence[Bias], threshold: float) -> float:
    """The smallest clip whose bias is tolerated, at most the threshold."""
    if bias:
        fine = [row.clip for row in bias if row.bias <= TOLERATED * row.gradient]
    else:
        fine = [float(c) for c in norms.uppers if norms.cut(float(c)) <= TOLERATED * norms.mean_norm]
    return min([threshold, *fine])
