"""Random numbers for synthetic images, from the one generator that is handed in."""

from __future__ import annotations

import torch
from torch import Tensor


class Chance:
    """Draws of a generator, float32 on its device."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=self._generator, device=self._generator.device)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self._generator.device)
