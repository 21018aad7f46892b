"""Labels: how many a loss can take, and what to do with those that it cannot."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from modelmix.errors import ModelMixError
from modelmix.gradients import synthetic_like
from modelmix.gradients.vmap import call_model
from modelmix.training.evaluation import evaluating, is_classification

_LOSSES = ("cross_entropy", "CrossEntropyLoss", "nll_loss", "NLLLoss")


class Labels:
    """What a loss takes as labels, found from public shapes and types alone.

    Args:
        model, loss: of the training.
        probe: (inputs, targets) of some samples, of which shapes and types are used and no value is.

    Raises:
        ModelMixError: if the loss takes labels of another type, or the model fails on samples of these shapes.
    """

    def __init__(self, model: nn.Module, loss: Any, probe: tuple[Any, Any]) -> None:
        self.classes: int | None = None
        """How many labels there are; None where the loss takes none."""
        self._ignored, self._said = getattr(loss, "ignore_index", -100), False
        if getattr(loss, "__name__", type(loss).__name__) not in _LOSSES:
            return
        _check_type(probe[1])
        device = next(model.parameters()).device
        problem: Exception | None = None
        for kind in ("normal", "uniform"):  # a model may refuse negative numbers
            inputs, targets = tree_map(lambda t: t.to(device), synthetic_like(probe, kind))
            try:
                with torch.no_grad(), evaluating(model):
                    outputs = call_model(model, inputs)
                break
            except Exception as error:
                problem = problem or error
        else:
            reason = " ".join(str(problem).split())[:200]
            raise ModelMixError(f"the model fails on samples of these shapes and types: {reason}") from problem
        if is_classification(outputs, targets):
            self.classes = int(outputs.shape[1])

    def unknown(self, targets: Any) -> Tensor | None:
        """Which labels the model has no output for, where there are labels."""
        labels = isinstance(targets, Tensor) and targets.dim() == 1 and not targets.is_floating_point()
        if self.classes is None or not labels:
            return None
        found: Tensor = ((targets < 0) | (targets >= self.classes)) & (targets != self._ignored)
        return found

    def check(self, targets: Any, split: str = "training") -> None:
        """Refuse labels that the model has no output for: an index error at best, on a GPU a dead process."""
        unknown = self.unknown(targets)
        if unknown is not None and bool(unknown.any()):
            odd = targets[unknown]
            most = 0 if self.classes is None else self.classes - 1
            raise ModelMixError(
                f"the {split} labels run from {int(odd.min())} to {int(odd.max())} where the model has {most + 1} "
                f"outputs: labels must be 0 to {most}. (This line is for the data holder's eyes.)"
            )

    def without_unknown(self, targets: Any, weights: Tensor) -> tuple[Any, Tensor]:
        """Let samples with such a label count as zero: stopping would depend on the data."""
        unknown = self.unknown(targets)
        if unknown is None:
            return targets, weights
        if not self._said and bool(unknown.any()):
            self._said = True
            warnings.warn(
                f"samples with a label that the model has no output for count as zero: labels must be 0 to "
                f"{(self.classes or 1) - 1}. (This line is for the data holder's eyes.)",
                stacklevel=2,
            )
        return torch.where(unknown, 0, targets), torch.where(unknown.to(weights.device), 0.0, weights)


def _check_type(targets: Any) -> None:
    if not isinstance(targets, Tensor) or targets.dtype in (torch.int64, torch.uint8):
        return
    if not targets.is_floating_point() or targets.dim() == 1:
        kind = str(targets.dtype).removeprefix("torch.")
        raise ModelMixError(f"the labels are {kind} and this loss takes int64: give targets.long() as targets.")
