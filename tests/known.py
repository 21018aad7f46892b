"""Gradients that are there, in the form that engines give them."""

from __future__ import annotations

import torch

from modelmix.gradients.lazy import LazyGradients


class Known(LazyGradients):
    """Gradients of parameters that are used once."""

    def __init__(self, *gradients):
        self._gradients = {str(i): g for i, g in enumerate(gradients)}
        shapes = {name: torch.empty_like(g.dense()[:1].sum(0)) for name, g in self._gradients.items()}
        super().__init__(shapes, gradients[0].samples)

    def of(self, names):
        return ((name, g) for name, g in self._gradients.items() if name in names)
