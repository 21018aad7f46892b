"""The clipped sum of per-sample gradients, by the engine that costs least.

``clipped_sum`` gives the same vector, up to rounding, with every engine and every size of chunks. ``Engine`` is the
same for a whole run: chosen and checked once, in another precision if asked, compiled if the machine makes that
worthwhile.

Where to look: ``engine`` is one engine for a run and ``selection`` finds the one that is right for a model. ``hooks``
run a batch once, with a rule for every layer in ``layers``; ``trace``, ``proved_pass`` and ``dataflow`` with its
``aten_...`` rules prove that samples never meet in that pass. ``vmap`` runs them one by one, while ``memory`` and
``independence`` watch that nothing is kept from one to the next. ``forms`` and ``lazy`` hold per-sample gradients,
``clip`` bounds and sums them; ``compiled`` and ``kernels`` make that fast on a GPU.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from modelmix._checks import whole
from modelmix.gradients.batch import Batch, Loss, count_rows
from modelmix.gradients.clip import Clip, ClippedSum
from modelmix.gradients.engine import Engine
from modelmix.gradients.lazy import LazyGradients
from modelmix.gradients.parameters import FlatParameters
from modelmix.gradients.selection import ENGINES, sum_of_chunk, synthetic_like

__all__ = [
    "ENGINES",
    "Batch",
    "Clip",
    "ClippedSum",
    "Engine",
    "FlatParameters",
    "LazyGradients",
    "Loss",
    "choose",
    "clipped_sum",
    "count_rows",
    "sum_of_chunk",
    "synthetic_like",
]


def choose(model: nn.Module, loss: Loss, inputs: Any, targets: Any) -> str:
    """Return the fastest engine that is right for a model and in which samples cannot meet, from shapes alone.

    >>> import torch
    >>> choose(torch.nn.Linear(3, 2), torch.nn.MSELoss(), torch.ones(4, 3), torch.ones(4, 2))
    'hooks'
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Engine(model, loss, (inputs, targets), compiled=False).name


def clipped_sum(
    model: nn.Module,
    loss: Loss,
    batch: Batch | tuple[Any, Any],
    clip: Clip,
    *,
    engine: str = "auto",
    chunk: int | None = None,
    precision: str | None = None,
    compiled: bool = False,
) -> Tensor:
    """Sum the gradients of every sample of a batch, each clipped by Algorithm 2 on its own.

    Guarantee: one sample more or less moves the sum by at most ``clip.c`` in the clip's norm, and no coordinate by more
    than ``clip.coordinate_bound``, whatever the model does with a batch: samples are kept apart by proof, or run one
    at a time. No noise is added: the sum is as private as the samples.

    Args:
        model: any module; its trainable parameters, in the order of ``named_parameters``, make up the vector.
        loss: ``loss(outputs, targets)`` as for ordinary training; it is only ever given one sample at a time.
        batch: a ``Batch``, or (inputs, targets), samples first. Inputs: a tensor, or a tuple or dict of tensors.
        clip: the bounds.
        engine: "hooks", "vmap", "loop", or "auto" for the fastest that is right for this model.
        chunk: samples at a time; it changes memory, not the result.
        precision: in which the model is run, "bfloat16" for instance; None takes the model's own.
        compiled: for sums that are taken many times, keep an ``Engine``: compiling takes longer than one sum.

    Returns:
        A float64 vector, one number for each trained coordinate. A sum: divide by the expected batch, not by the drawn.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> x, y = 100 * torch.ones(5, 2), torch.zeros(5, 1)
    >>> total = clipped_sum(model, torch.nn.MSELoss(), (x, y), Clip(1.0))
    >>> round(float(total.norm()), 4)  # five samples that pull one way, of length 1 each
    5.0
    """
    whole_batch = (batch if isinstance(batch, Batch) else Batch(*batch)).checked()
    flat = FlatParameters(model)
    parameters = flat.views(flat.read())
    total = torch.zeros(flat.size, dtype=torch.float64, device=next(model.parameters()).device)
    m = whole_batch.samples
    size = max(1, m) if chunk is None else whole("chunk", chunk, "the number of samples held at once", least=1)
    if not m:
        return total
    probe = whole_batch.inputs, whole_batch.targets
    run = Engine(model, loss, probe, name=engine, precision=precision, compiled=compiled)
    for start in range(0, m, size):
        total += run(parameters, whole_batch.part(slice(start, start + size)), clip).total
    return total
