"""Norms of per-sample gradients at one state: what a clip is chosen by.

``gradient_statistics`` looks at samples as they are, for public data. ``private_norm_histogram`` is a mechanism: what
it returns may be used freely once its phase is in the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from modelmix.accounting.ledger import Phase
from modelmix.accounting.mechanism import Mechanism
from modelmix.errors import ModelMixError
from modelmix.gradients import Batch, Engine, Loss, vmap
from modelmix.gradients.parameters import FlatParameters
from modelmix.theory.clipping import EDGES, Array, Bias, NormHistogram, bin_of
from modelmix.training.guard import check_model
from modelmix.training.randomness import Randomness

_CHUNK = 64


@dataclass(frozen=True, eq=False)
class GradientStatistics:
    """Of n samples at one state: norms |g_i|, noise |g_i - mean|, and the bias of clipping at every clip."""

    norms: Array
    noise: Array
    bias: list[Bias]


def gradient_statistics(
    model: nn.Module, loss: Loss, batch: tuple[Tensor, Tensor], clips: Sequence[float]
) -> GradientStatistics:
    """Exact statistics of these samples, **without any noise**: for public or synthetic samples only.

    Two passes, so that no more than a few dozen gradients are in memory.
    """
    check_model(model)
    inputs, targets = batch
    parameters = dict(FlatParameters(model).views(FlatParameters(model).read()))
    n, size = len(targets), FlatParameters(model).size
    levels = torch.tensor(clips, dtype=torch.float64)
    sums = torch.zeros(1 + len(clips), size, dtype=torch.float64)
    model.eval()  # every sample's gradient its own, without dropout's

    def gradients(part: Tensor) -> Tensor:
        found = vmap.per_sample(model, loss, parameters, Batch(inputs[part], targets[part])).gradients
        return torch.cat([g.dense().flatten(1) for g in found.values()], dim=1).double()

    parts = torch.split(torch.arange(n), _CHUNK)
    norms = []
    for part in parts:
        g = gradients(part)
        lengths = g.norm(dim=1)
        if not bool(torch.isfinite(lengths).all()):
            raise ModelMixError("a sample's gradient is not finite: give other weights or other samples.")
        scale = (levels[:, None] / lengths.clamp_min(1e-300)).clamp_max(1.0)
        sums += torch.cat([torch.ones(1, len(part), dtype=torch.float64), scale]) @ g
        norms.append(lengths)
    means = (sums / n).numpy()
    mean = torch.from_numpy(means[0])
    noise = torch.cat([(gradients(part) - mean).norm(dim=1) for part in parts]).numpy()
    lengths_all = torch.cat(norms).numpy()
    curve = [Bias.of(c, means[0], row, lengths_all) for c, row in zip(clips, means[1:], strict=True)]
    return GradientStatistics(lengths_all, noise, curve)


@dataclass(frozen=True, eq=False)
class NormRelease:
    """A noisy histogram of gradient norms, and the phase that pays for it.

    Put the phase into the ledger *before* anything computed from the histogram is kept; ``seeded`` says whether its
    noise is repeatable, which that ledger has to say as well.
    """

    histogram: NormHistogram
    phase: Phase
    seeded: bool = False


def private_norm_histogram(
    model: nn.Module, loss: Loss, batch: tuple[Tensor, Tensor], mechanism: Mechanism, randomness: Randomness
) -> NormRelease:
    """Counts of per-sample gradient norms in fixed bins, by the Gaussian mechanism.

    Neighbours differ in one sample's contribution, see ``adjacency``; nothing is divided by their number. A Poisson
    draw at rate q picks samples; each of them raises exactly one count by one, so the vector of counts has l2
    sensitivity 1, and noise of standard deviation z on every count is one step of ``Mechanism(z, q)``, the phase of the
    release. Noisy counts are rounded, which is post-processing.

    The weights of ``model`` must be public or released: they do not depend on these samples but through the ledger. The
    bins are constants. Every sample's gradient is computed alone, from a fresh copy, so that its norm, to the last bit,
    does not depend on which other samples there are: a neighbour near the edge of a bin stays on its side.

    Args:
        mechanism: plain Gaussian: no mixing, no truncation.
        randomness: its key serves this release and moves on, so that a second one has noise of its own.
    """
    if mechanism.mixed or mechanism.law != "gaussian" or mechanism.p != 1:
        raise ModelMixError("a histogram is released with plain Gaussian noise: give Mechanism(z, q) and nothing else.")
    check_model(model)
    inputs, targets = batch
    parameters = dict(FlatParameters(model).views(FlatParameters(model).read()))
    model.eval()
    counts = np.zeros(EDGES.size + 1)
    engine = Engine(model, loss, (inputs[:1], targets[:1]), name="loop")
    engine.remember()
    draws = randomness.step()
    for i in draws.poisson_indices("norm sampling", len(targets), mechanism.sample_rate).tolist():
        sample = Batch(inputs[i : i + 1].clone(), targets[i : i + 1].clone())
        found = vmap.per_sample_loop(model, loss, parameters, sample).gradients
        square = sum(float(g.dense().double().square().sum()) for g in found.values())
        counts[bin_of([np.sqrt(square)])[0]] += 1
    engine.check()
    noise = draws.gaussian("norm histogram", counts.size).numpy()
    randomness.advance()  # before anybody has seen the noise
    noisy = np.round(counts + mechanism.noise_multiplier * noise)
    return NormRelease(NormHistogram(noisy, mechanism.noise_multiplier), Phase(mechanism, 1), randomness.seeded)
