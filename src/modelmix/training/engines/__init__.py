"""Engines for the one thing training needs: the sum of clipped per-sample gradients.

``clipped_sum`` gives the same vector, up to rounding, with every engine and every chunk size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from modelmix.errors import ModelMixError
from modelmix.training.clipping import Clip, ClippedSum
from modelmix.training.engines import hooks, universal
from modelmix.training.parameters import FlatParameters

Loss = Callable[[Any, Any], Tensor]
PerSample = Callable[[nn.Module, Loss, dict[str, Tensor], Any, Any, int], dict[str, Tensor]]

ENGINES: dict[str, PerSample] = {
    "hooks": hooks.per_sample,
    "universal": universal.per_sample,
    "loop": universal.per_sample_loop,
}

_PROBE = 3


def clipped_sum(
    model: nn.Module,
    loss: Loss,
    batch: tuple[Any, Any],
    clip: Clip,
    *,
    engine: str = "auto",
    chunk: int | None = None,
) -> Tensor:
    """The sum over a batch of every sample's gradient, each clipped by Algorithm 2 on its own.

    Args:
        model: any module; its trainable parameters, in the order of ``named_parameters``, make up the vector.
        loss: ``loss(outputs, targets)`` as for ordinary training; it is only ever given one sample at a time.
        batch: (inputs, targets), samples first. Inputs: a tensor, or a tuple or dict of tensors.
        clip: the bounds.
        engine: "hooks", "universal", "loop", or "auto" for the fastest that is right for this model.
        chunk: samples at a time; it changes memory, not the result.

    Returns:
        A float64 vector, one number for each trained coordinate. A sum: divide by the expected batch, not by the drawn.
    """
    inputs, targets = batch
    flat = FlatParameters(model)
    m = rows(inputs)
    total = torch.zeros(flat.size, dtype=torch.float64, device=next(model.parameters()).device)
    if m == 0:
        return total
    if engine == "auto":
        engine = choose(model, loss, inputs, targets)
    parameters = flat.views(flat.read())
    for start in range(0, m, chunk or m):
        part = slice(start, start + (chunk or m))
        x, y = (tree_map(lambda t, part=part: t[part], tree) for tree in (inputs, targets))
        ones = torch.ones(rows(x), dtype=torch.float64, device=total.device)
        total += sum_of_chunk(engine, model, loss, parameters, x, y, ones, clip).total
    return total


def sum_of_chunk(
    engine: str,
    model: nn.Module,
    loss: Loss,
    parameters: dict[str, Tensor],
    inputs: Any,
    targets: Any,
    weights: Tensor,
    clip: Clip,
    copies: int = 1,
) -> ClippedSum:
    """The clipped sum of one chunk at the given parameters; every sample is ``copies`` rows that follow each other."""
    if engine not in ENGINES:
        raise ModelMixError(f"engine = {engine!r} is unknown: choose auto, {', '.join(ENGINES)}.")
    found = ENGINES[engine](model, loss, parameters, inputs, targets, copies)
    m = weights.shape[0]
    return clip.sum([found[n] if n in found else p.new_zeros(m, p.numel()) for n, p in parameters.items()], weights)


def rows(tree: Any) -> int:
    """Samples in a batch."""
    leaves = tree_leaves(tree)
    if not leaves or not all(isinstance(t, Tensor) and t.dim() > 0 for t in leaves):
        raise ModelMixError("a batch is a tensor, or a tuple or dict of tensors, with the samples first.")
    if len({t.shape[0] for t in leaves}) != 1:
        raise ModelMixError("the tensors of a batch do not have the same number of samples.")
    return int(leaves[0].shape[0])


def choose(model: nn.Module, loss: Loss, inputs: Any, targets: Any) -> str:
    """The fastest engine that is right for this model, found by comparing them on a few samples.

    Hooks can be wrong without noticing, where a model uses a weight behind a layer's back or lets samples meet; the
    universal engine cannot, so it is the judge.
    """
    m = min(_PROBE, rows(inputs))
    where = torch.arange(_PROBE) % m  # always several rows, so that samples can meet if the model lets them
    probe = tree_map(lambda t: t.detach()[where.to(t.device)].cpu(), (inputs, targets))
    problem: Exception | None = None
    for dtype, tolerance in ((torch.float64, 1e-8), (None, 1e-4)):  # some models do not run in float64
        try:
            twin = copy.deepcopy(model).to("cpu", dtype) if dtype else copy.deepcopy(model).cpu()
        except Exception:  # a model that cannot be copied is not for the fast engine
            return "universal"
        quiet(twin)
        x, y = tree_map(lambda t, dtype=dtype: t.to(dtype) if dtype and t.is_floating_point() else t, probe)
        parameters = {name: p.detach() for name, p in twin.named_parameters() if p.requires_grad}
        for judge in ("universal", "loop"):
            try:
                right = ENGINES[judge](twin, loss, parameters, x, y, 1)
            except ModelMixError:
                raise
            except Exception as error:  # whatever torch.func does not support, autograd may
                problem = error
                continue
            return "hooks" if _hooks_agree(twin, loss, parameters, x, y, right, tolerance) else judge
    raise ModelMixError(f"the model fails on a batch of one sample: {_line(problem)}") from problem


def _hooks_agree(
    model: nn.Module,
    loss: Loss,
    parameters: dict[str, Tensor],
    inputs: Any,
    targets: Any,
    right: dict[str, Tensor],
    tolerance: float,
) -> bool:
    try:
        found = hooks.per_sample(model, loss, parameters, inputs, targets, 1)
        size = torch.stack([g.norm() for g in right.values()]).norm()
        for name, wanted in right.items():
            mine = found[name].reshape(wanted.shape) if name in found else torch.zeros_like(wanted)
            if not bool((mine - wanted).norm() <= tolerance * size):
                return False
    except Exception:  # not for this model, then
        return False
    return True


def quiet(model: nn.Module) -> None:
    """Dropout off, so that two passes can be compared."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0


def _line(error: BaseException | None) -> str:
    text = " ".join(str(error).split())
    return (text[:200] + "...") if len(text) > 200 else (text or type(error).__name__)
