"""A synthetic sample that is run before and after the private ones, to see whether they left anything behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from modelmix.errors import UnprovedError
from modelmix.gradients.gradients import Gradients
from modelmix.gradients.memory import ALONE
from modelmix.gradients.torch_rng import draws_apart

_TIMES = 4  # what alternates with a short period is seen before the first private sample
_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-5}  # sums may be taken in another order


class SampleAlone:
    """The gradient of one synthetic sample at fixed weights and fixed draws, which may never change.

    A model that remembers earlier samples, wherever it keeps them (a script module, an extension, a context variable),
    computes another gradient for a sample that comes later. Contents that Python can reach are compared elsewhere, see
    ``memory``; this looks at what they do. It does not see a memory that acts on some samples and not on this one.

    Args:
        gradients: of the one sample, by parameter.
        inputs: the sample, for its device.
    """

    def __init__(self, gradients: Callable[[], dict[str, Gradients]], inputs: Any) -> None:
        self._gradients, self._device = gradients, tree_leaves(inputs)[0].device
        self._found: dict[str, Tensor] | None = None
        try:
            self._found = self._now()
        except Exception:  # a model that cannot run on synthetic samples is watched by its contents alone
            return
        for _ in range(_TIMES - 1):
            self.check()

    def check(self) -> None:
        """Raise ``UnprovedError`` if the sample's gradient is another one than at first."""
        if self._found is None:
            return
        now = self._now()
        if now.keys() != self._found.keys() or not all(_same(now[name], g) for name, g in self._found.items()):
            raise UnprovedError(
                ALONE,
                "the model or the criterion computes another gradient for the same sample after others have run.",
                "Compute it from the sample alone; keep nothing of one forward pass, wherever that is.",
            )

    def _now(self) -> dict[str, Tensor]:
        with draws_apart(self._device):
            torch.manual_seed(0)
            return {name: g.dense().detach().clone() for name, g in self._gradients().items()}


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    within = _ROUNDING.get(a.dtype, 1e-2)
    size = float(b.double().nan_to_num().abs().max()) if b.numel() else 0.0
    return torch.allclose(a.double(), b.double(), rtol=within, atol=within * size, equal_nan=True)
