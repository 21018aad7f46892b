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
from modelmix.privacy.validation import whole
from modelmix.training.clipping import Clip, ClippedSum
from modelmix.training.engines import hooks, universal
from modelmix.training.parameters import FlatParameters

Loss = universal.Loss
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
    parameters = flat.views(flat.read())
    total = torch.zeros(flat.size, dtype=torch.float64, device=next(model.parameters()).device)
    m = rows((inputs, targets))
    size = max(1, m) if chunk is None else whole("chunk", chunk, "the number of samples held at once", least=1)
    if m and engine in ("auto", "hooks"):
        right = choose(model, loss, inputs, targets)
        if engine == "hooks" and right != "hooks":
            raise ModelMixError('the hook engine is not right for this model: use engine="auto" or "universal".')
        engine = right
    for start in range(0, m, size):
        x, y = tree_map(lambda t, start=start: t[start : start + size], (inputs, targets))
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
    m = weights.shape[0]
    if rows((inputs, targets)) != m * copies:
        raise ModelMixError(f"{m} samples of {copies} rows each are not the {rows(inputs)} rows that were given.")
    inputs, targets = tree_map(lambda t: t.detach(), (inputs, targets))
    before = [p._version for p in parameters.values()]
    found = ENGINES[engine](model, loss, parameters, inputs, targets, copies) if m else {}
    if before != [p._version for p in parameters.values()]:
        raise ModelMixError(
            "the model changes its trained parameters while it runs (max_norm?): only steps may do that."
        )
    return clip.sum([found[n] if n in found else p.new_zeros(m, *p.shape) for n, p in parameters.items()], weights)


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
    universal engine cannot, so it is the judge. They are compared near the model's weights, not at them, and with
    losses of different weight: where a last layer begins at zero, or the samples are all alike, much of a gradient
    vanishes, and the errors with it.

    A model that ``torch.func`` cannot run is left to the loop: often it looks at the values of a batch to decide what
    to compute, and then a few samples do not show that it treats every one alone.
    """
    where = torch.arange(_PROBE) % rows((inputs, targets))  # several rows, so that samples can meet if they are let
    device = next(model.parameters()).device
    probe = tree_map(lambda t: t.detach()[where.to(t.device)].to(device), (inputs, targets))
    twin = model
    # Some models do not run in float64, and then rounding must be told from error.
    for dtype, relative, absolute in ((torch.float64, 1e-8, 1e-11), (None, 1e-4, 1e-5)):
        try:
            twin = copy.deepcopy(model).to(dtype) if dtype else copy.deepcopy(model)
            quiet(twin)
            x, y = tree_map(lambda t, dtype=dtype: t.to(dtype) if t.is_floating_point() else t, probe)
            case = (twin, _weighted(loss), _nearby(twin), x, (y, _sample_weights(x)), 1)
            right = universal.per_sample(*case)
        except Exception:  # a model that cannot be copied, or cannot run so
            continue
        return "hooks" if _hooks_agree(case, right, relative, absolute) else "universal"
    problem: Exception | None = None
    for engine in ("universal", "loop"):
        try:
            ENGINES[engine](twin, loss, _nearby(twin), probe[0], probe[1], 1)
        except ModelMixError:
            raise
        except Exception as error:  # whatever torch.func does not support, autograd may
            problem = error
        else:
            return engine
    raise ModelMixError(f"the model fails on a batch of one sample: {_line(problem)}") from problem


def _nearby(model: nn.Module) -> dict[str, Tensor]:
    """Other weights, of about the size of the model's."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            noise = torch.randn(p.shape, generator=generator).to(p)
            found[name] = p.detach() + 0.1 * (p.detach().square().mean().sqrt() + 0.1) * noise
    return found


def _sample_weights(inputs: Any) -> Tensor:
    first = tree_leaves(inputs)[0]
    return torch.arange(1.0, first.shape[0] + 1, device=first.device)


def _weighted(loss: Loss) -> Loss:
    return lambda outputs, targets: universal.one_number(loss(outputs, targets[0])) * targets[1].sum()


def _hooks_agree(case: tuple[Any, ...], right: dict[str, Tensor], relative: float, absolute: float) -> bool:
    try:
        found = hooks.per_sample(*case)
        size = torch.stack([g.double().norm() for g in right.values()]).norm()
        for name, wanted in right.items():
            mine = found[name].reshape(wanted.shape) if name in found else torch.zeros_like(wanted)
            off = (mine.double() - wanted.double()).norm()
            if not bool(off <= relative * wanted.double().norm() + absolute * size):
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
