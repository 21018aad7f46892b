"""The engines by name, and which is right for a model, found from public shapes alone: no sample is looked at."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from modelmix.errors import ModelMixError
from modelmix.gradients import hooks, proved_pass, vmap
from modelmix.gradients.batch import Batch, Loss, PassResult
from modelmix.gradients.clip import Clip, ClippedSum
from modelmix.gradients.forms import Gradients
from modelmix.gradients.memory import Watch
from modelmix.gradients.trace import one_line

ENGINES: dict[str, Callable[..., PassResult]] = {"hooks": proved_pass.per_sample, **vmap.ONE_BY_ONE}

_PROBE = 3  # samples


def require_known(engine: str) -> str:
    """Return the name of an engine.

    Raises:
        ModelMixError: if it is none.
    """
    if engine not in ENGINES:
        raise ModelMixError(f"engine = {engine!r} is unknown: choose auto, {', '.join(ENGINES)}.")
    return engine


def per_sample_gradients(
    engine: str, model: nn.Module, loss: Loss, parameters: dict[str, Tensor], batch: Batch
) -> list[Gradients]:
    """Compute the gradient of every sample for every parameter, in order, by an engine that is used this once."""
    batch, found = batch.checked().map(Tensor.detach), PassResult({})
    if batch.samples:
        with vmap.refuse_parameter_writes(parameters):
            found = ENGINES[require_known(engine)](model, loss, parameters, batch)
    return found.in_order(parameters, batch)


def sum_of_chunk(
    engine: str, model: nn.Module, loss: Loss, parameters: dict[str, Tensor], batch: Batch, clip: Clip
) -> ClippedSum:
    """Sum the clipped gradients of one batch at the given parameters, by an engine that is used this once."""
    require_known(engine)
    return clip.sum(per_sample_gradients(engine, model, loss, parameters, batch), batch.sample_weights)


def synthetic_like(
    batch: Any, kind: str = "normal", count: int | None = None, device: torch.device | None = None
) -> Any:
    """Make public samples of the same shapes and types: no value of ``batch`` is looked at.

    Args:
        kind: "normal" or "uniform" on (0, 1), for floats; integers are 0 or 1.
        count: samples; None makes as many as there are.
        device: None takes that of each tensor.

    >>> synthetic_like((torch.ones(9, 3), torch.zeros(9)), count=2)[0].shape
    torch.Size([2, 3])
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def like(t: Tensor) -> Tensor:
        shape = (t.shape[0] if count is None else count, *t.shape[1:])
        if t.is_floating_point() or t.is_complex():
            draw = torch.randn if kind == "normal" else torch.rand
            made = draw(shape, generator=generator, device="cpu")
        else:
            made = torch.randint(0, 2, shape, generator=generator, device="cpu")
        return made.to(t.device if device is None else device, t.dtype)

    return tree_map(like, batch)


def synthetic_batch(batch: Batch, kind: str = "normal") -> Batch:
    """Return a batch like another one, of synthetic samples with the same weights."""
    inputs, targets = synthetic_like((batch.inputs, batch.targets), kind)
    return replace(batch, inputs=inputs, targets=targets)


def find_disagreement(model: nn.Module, loss: Loss, batch: tuple[Any, Any]) -> str | None:
    """Say why hooks would give other gradients than one sample at a time, on synthetic samples; None if they do not.

    Hooks can be wrong without noticing where a model uses a weight behind a layer's back. That is a matter of
    correctness: that samples do not meet is proved elsewhere. They are compared near the model's weights, not at them,
    and with losses of different weight: where a last layer begins at zero, or the samples are all alike, much of a
    gradient vanishes, and the errors with it.
    """
    device = next(model.parameters()).device
    # Some models do not run in float64, and then rounding must be told from error.
    for dtype, relative, absolute in ((torch.float64, 1e-8, 1e-11), (None, 1e-4, 1e-5)):
        for kind in ("normal", "uniform"):
            try:
                twin = copy.deepcopy(model).to(dtype) if dtype else copy.deepcopy(model)
                disable_dropout(twin)
                probe = synthetic_like(batch, kind, _PROBE, device)
                x, y = tree_map(lambda t, dtype=dtype: t.to(dtype) if dtype and t.is_floating_point() else t, probe)
                case = (twin, _weighted(loss), _nearby(twin), Batch(x, (y, _sample_weights(x))))
                right = _one_by_one(case)
            except Exception:  # a model that cannot be copied, or cannot run so
                continue
            if not all(bool(torch.isfinite(g.dense()).all()) for g in right.values()):
                continue
            if _hooks_agree(case, right, relative, absolute):
                return None
            return "the gradients that hooks see are not those of single samples (a weight used outside of its layer?)"
    return "the model does not run on synthetic samples of these shapes, by which its gradients are checked"


def _one_by_one(case: tuple[Any, ...]) -> dict[str, Gradients]:
    try:
        return vmap.per_sample(*case).gradients
    except Exception:  # whatever torch.func does not support, autograd may
        return vmap.per_sample_loop(*case).gradients


def select_fallback(model: nn.Module, loss: Loss, parameters: dict[str, Tensor], batch: tuple[Any, Any]) -> str:
    """Find the fastest engine in which samples cannot meet that runs this model, on synthetic samples.

    Raises:
        ModelMixError: if none does.
    """
    problem: Exception | None = None
    device = next(model.parameters()).device
    for kind in ("normal", "uniform"):
        for engine in vmap.ONE_BY_ONE:
            probe = Batch(*synthetic_like(batch, kind, _PROBE, device))
            try:
                ENGINES[engine](model, loss, parameters, probe)
                kept = Watch(model, attributes=True)  # what is made once is made by now
                ENGINES[engine](model, loss, parameters, probe)
                kept.check()
            except ModelMixError:
                raise
            except Exception as error:  # whatever torch.func does not support, autograd may
                problem = problem or error
            else:
                return engine
    raise ModelMixError(f"the model fails on a batch of one sample: {one_line(problem)}") from problem


def _nearby(model: nn.Module) -> dict[str, Tensor]:
    """Draw other weights, of about the size of the model's."""
    generator = torch.Generator("cpu").manual_seed(0)
    found = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            noise = torch.randn(p.shape, generator=generator, device="cpu").to(p)
            found[name] = p.detach() + 0.1 * (p.detach().square().mean().sqrt() + 0.1) * noise
    return found


def _sample_weights(inputs: Any) -> Tensor:
    first = tree_leaves(inputs)[0]
    return torch.arange(1.0, first.shape[0] + 1, device=first.device)


def _weighted(loss: Loss) -> Loss:
    return lambda outputs, targets: vmap.to_scalar(loss(outputs, targets[0])) * targets[1].sum()


def _hooks_agree(case: tuple[Any, ...], right: dict[str, Gradients], relative: float, absolute: float) -> bool:
    try:
        found = hooks.per_sample(*case).gradients
        size = torch.stack([g.dense().double().norm() for g in right.values()]).norm()
        for name, g in right.items():
            wanted = g.dense().double()
            mine = found[name].dense().double() if name in found else torch.zeros_like(wanted)
            if not bool((mine - wanted).norm() <= relative * wanted.norm() + absolute * size):
                return False
    except Exception:  # not for this model, then
        return False
    return True


def disable_dropout(model: nn.Module) -> None:
    """Turn dropout off, so that two passes can be compared."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
