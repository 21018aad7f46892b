"""Synthetic samples that are run before and after the private ones, to see whether they left anything behind."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from modelmix.errors import UnprovedError
from modelmix.gradients.device import preserve_torch_rng
from modelmix.gradients.forms import Gradients
from modelmix.gradients.memory import ALONE

_TIMES = 4  # what alternates with a short period is seen before the first private sample
_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-5}  # sums may be taken in another order


class IndependenceProbe:
    """Compare the gradients of synthetic samples, at fixed weights and draws, with what they were at first.

    A model that remembers earlier samples, wherever it keeps them (a script module, an extension, a context variable),
    computes another gradient for a sample that comes later. Contents that Python can reach are compared elsewhere, see
    ``memory``; this looks at what they do. It does not see a memory that acts on some samples and not on these.

    Args:
        gradients: of each of the samples, by parameter.
        device: of the samples.
    """

    def __init__(self, gradients: Sequence[Callable[[], dict[str, Gradients]]], device: torch.device) -> None:
        self._device = device
        self._samples: list[tuple[Callable[[], dict[str, Gradients]], dict[str, Tensor]]] = []
        ran = False
        for each in gradients:
            try:
                found = self._now(each)
            except Exception:  # a model may refuse some numbers; what it is then given will say more
                continue
            ran = True
            if found and all(bool(torch.isfinite(g).all()) for g in found.values()):
                self._samples.append((each, found))
        if ran and not self._samples:
            warnings.warn(
                "the model has no finite gradient on synthetic samples: whether it keeps something of samples is seen "
                "by what Python can reach alone.",
                stacklevel=2,
            )
        for _ in range(_TIMES - 1):
            self.check()

    def check(self) -> None:
        """Raise ``UnprovedError`` if the gradient of a sample is another one than at first."""
        for each, found in self._samples:
            now = self._now(each)
            if now.keys() != found.keys() or not all(_same(now[name], g) for name, g in found.items()):
                raise UnprovedError(
                    ALONE,
                    "the model or the criterion computes another gradient for the same sample after others have run.",
                    "Compute it from the sample alone; keep nothing of one forward pass, wherever that is.",
                )

    def _now(self, gradients: Callable[[], dict[str, Gradients]]) -> dict[str, Tensor]:
        with preserve_torch_rng(self._device):
            torch.manual_seed(0)
            return {name: g.dense().detach().clone() for name, g in gradients().items()}


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    within = _ROUNDING.get(a.dtype, 1e-2)
    size = float(b.double().nan_to_num().abs().max()) if b.numel() else 0.0
    return torch.allclose(a.double(), b.double(), rtol=within, atol=within * size, equal_nan=True)
