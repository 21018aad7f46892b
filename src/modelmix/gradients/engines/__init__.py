"""Engines for the one thing training needs: the sum of clipped per-sample gradients.

``clipped_sum`` gives the same vector, up to rounding, with every engine and every chunk size. ``Engine`` is the same
for a whole run: chosen and checked once, in another precision if asked, compiled if the machine makes that worthwhile.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from modelmix._checks import whole
from modelmix.gradients.clipping import Clip
from modelmix.gradients.engines import universal
from modelmix.gradients.engines.choice import quiet, synthetic
from modelmix.gradients.engines.chunk import ENGINES, Loss, rows, sum_of_chunk
from modelmix.gradients.engines.engine import Engine
from modelmix.gradients.parameters import FlatParameters

__all__ = [
    "ENGINES",
    "Engine",
    "Loss",
    "choose",
    "clipped_sum",
    "quiet",
    "rows",
    "sum_of_chunk",
    "synthetic",
    "universal",
]


def choose(model: nn.Module, loss: Loss, inputs: Any, targets: Any) -> str:
    """The fastest engine that is right for this model and in which samples cannot meet, from shapes alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Engine(model, loss, (inputs, targets), compiled=False).name


def clipped_sum(
    model: nn.Module,
    loss: Loss,
    batch: tuple[Any, Any],
    clip: Clip,
    *,
    engine: str = "auto",
    chunk: int | None = None,
    precision: str | None = None,
    compiled: bool = False,
) -> Tensor:
    """The sum over a batch of every sample's gradient, each clipped by Algorithm 2 on its own.

    Args:
        model: any module; its trainable parameters, in the order of ``named_parameters``, make up the vector.
        loss: ``loss(outputs, targets)`` as for ordinary training; it is only ever given one sample at a time.
        batch: (inputs, targets), samples first. Inputs: a tensor, or a tuple or dict of tensors.
        clip: the bounds.
        engine: "hooks", "universal", "loop", or "auto" for the fastest that is right for this model.
        chunk: samples at a time; it changes memory, not the result.
        precision: in which the model is run, "bfloat16" for instance; None takes the model's own.
        compiled: for sums that are taken many times, keep an ``Engine``: compiling takes longer than one sum.

    Returns:
        A float64 vector, one number for each trained coordinate. A sum: divide by the expected batch, not by the drawn.
    """
    inputs, targets = batch
    flat = FlatParameters(model)
    parameters = flat.views(flat.read())
    total = torch.zeros(flat.size, dtype=torch.float64, device=next(model.parameters()).device)
    m = rows((inputs, targets))
    size = max(1, m) if chunk is None else whole("chunk", chunk, "the number of samples held at once", least=1)
    if not m:
        return total
    run = Engine(model, loss, (inputs, targets), name=engine, precision=precision, compiled=compiled)
    for start in range(0, m, size):
        x, y = tree_map(lambda t, start=start: t[start : start + size], (inputs, targets))
        total += run(parameters, x, y, torch.ones(rows(x), dtype=torch.float64, device=total.device), clip).total
    return total
