"""Which engine is right for a model, found from public shapes alone: no sample is looked at."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from modelmix.errors import ModelMixError
from modelmix.gradients.engines import hooks, universal
from modelmix.gradients.engines.chunk import ENGINES, Loss, unchanged
from modelmix.gradients.gradients import Gradients
from modelmix.gradients.memory import Watch

_PROBE = 3


@contextmanager
def exact() -> Iterator[None]:
    """Products of floats without rounding their factors to 11 bits, as GPUs do by default."""
    with _products(False, "highest"):
        yield


@contextmanager
def rough(device: torch.device) -> Iterator[None]:
    """Products of floats with factors rounded to 11 bits where the device is many times faster so."""
    if device.type == "cpu":
        yield
        return
    with _products(True, "high"):
        yield


@contextmanager
def _products(cudnn: bool, matrices: str) -> Iterator[None]:
    try:
        before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    except RuntimeError:  # set in torch's newer way, which the older one cannot read: left as it is
        yield
        return
    torch.backends.cudnn.allow_tf32 = cudnn
    torch.set_float32_matmul_precision(matrices)
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before[0]
        torch.set_float32_matmul_precision(before[1])


def synthetic(batch: Any, kind: str = "normal", count: int | None = None, device: torch.device | None = None) -> Any:
    """Samples of the same shapes and types that nobody has to protect: no value of ``batch`` is looked at.

    Args:
        kind: "normal" or "uniform" on (0, 1), for floats; integers are 0 or 1.
        count: samples; None makes as many as there are.
        device: None takes that of each tensor.
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


def disagreement(model: nn.Module, loss: Loss, batch: tuple[Any, Any]) -> str | None:
    """Whether hooks give other gradients than one sample at a time, on synthetic samples; None if they do not.

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
                quiet(twin)
                probe = synthetic(batch, kind, _PROBE, device)
                x, y = tree_map(lambda t, dtype=dtype: t.to(dtype) if dtype and t.is_floating_point() else t, probe)
                case = (twin, _weighted(loss), _nearby(twin), x, (y, _sample_weights(x)), 1)
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
        return universal.per_sample(*case)
    except Exception:  # whatever torch.func does not support, autograd may
        return universal.per_sample_loop(*case)


def slower(model: nn.Module, loss: Loss, parameters: dict[str, Tensor], batch: tuple[Any, Any]) -> str:
    """The fastest of the engines in which samples cannot meet that runs this model, found on synthetic samples."""
    problem: Exception | None = None
    device = next(model.parameters()).device
    for kind in ("normal", "uniform"):
        for engine in ("universal", "loop"):
            x, y = synthetic(batch, kind, _PROBE, device)
            try:
                with unchanged(parameters):
                    ENGINES[engine](model, loss, parameters, x, y, 1)
                    kept = Watch(model, attributes=True)  # what is made once is made by now
                    ENGINES[engine](model, loss, parameters, x, y, 1)
                kept.check()
            except ModelMixError:
                raise
            except Exception as error:  # whatever torch.func does not support, autograd may
                problem = problem or error
            else:
                return engine
    raise ModelMixError(f"the model fails on a batch of one sample: {_line(problem)}") from problem


def _nearby(model: nn.Module) -> dict[str, Tensor]:
    """Other weights, of about the size of the model's."""
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
    return lambda outputs, targets: universal.one_number(loss(outputs, targets[0])) * targets[1].sum()


def _hooks_agree(case: tuple[Any, ...], right: dict[str, Gradients], relative: float, absolute: float) -> bool:
    try:
        found = hooks.per_sample(*case)
        size = torch.stack([g.dense().double().norm() for g in right.values()]).norm()
        for name, g in right.items():
            wanted = g.dense().double()
            mine = found[name].dense().double() if name in found else torch.zeros_like(wanted)
            if not bool((mine - wanted).norm() <= relative * wanted.norm() + absolute * size):
                return False
    except Exception:  # not for this model, then
        return False
    return True


def quiet(model: nn.Module) -> None:
    """Dropout off, so that two passes can be compared."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0


def _line(error: BaseException | None) -> str:
    text = " ".join(str(error).split())
    return (text[:200] + "...") if len(text) > 200 else (text or type(error).__name__)
