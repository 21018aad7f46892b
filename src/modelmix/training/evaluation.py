"""Accuracy and loss of a released state on held-out samples. Reported, never used to choose anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from modelmix.gradients import Loss, count_rows
from modelmix.gradients.vmap import call_model_at
from modelmix.training.sampling import Source

_BATCH = 500


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode, and every module's own mode again afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def is_classification(outputs: Any, targets: Any) -> bool:
    return (
        isinstance(outputs, Tensor)
        and isinstance(targets, Tensor)
        and outputs.dim() == 2
        and targets.dim() == 1
        and not targets.is_floating_point()
    )


@torch.no_grad()
def evaluate(
    model: nn.Module, loss: Loss, parameters: dict[str, Tensor], source: Source, device: torch.device
) -> dict[str, float | None]:
    """{"accuracy": ..., "loss": ...}; no accuracy where the outputs are not scores of classes."""
    right, total, seen = 0, 0.0, 0
    classes = False
    indices = [torch.arange(i, min(i + _BATCH, source.n), device="cpu") for i in range(0, source.n, _BATCH)]
    with evaluating(model):
        for index, chunks in zip(indices, source.steps(iter(indices), _BATCH), strict=True):
            for chunk in chunks:
                m = index.numel()
                inputs, targets = tree_map(lambda t, m=m: t[:m].to(device), (chunk.inputs, chunk.targets))
                outputs = call_model_at(model, parameters, inputs)
                classes = is_classification(outputs, targets)
                total += float(loss(outputs, targets).mean()) * count_rows(targets)
                right += int((outputs.argmax(1) == targets).sum()) if classes else 0
                seen += count_rows(targets)
    return {"accuracy": right / seen if classes else None, "loss": total / seen}
