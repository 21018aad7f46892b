"""Images of nothing: smooth random patterns with a pattern for every class. Nobody's data, so nobody pays for them."""

from __future__ import annotations

import torch

from modelmix._checks import whole
from modelmix.data.dataset import Split

_COARSE = 6  # patterns are drawn on a grid this fine and smoothed


def synthetic(
    shape: tuple[int, int, int] = (1, 28, 28), classes: int = 10, samples: int = 2000, seed: int = 0
) -> Split:
    """Draw ``samples`` uint8 images C x H x W: the pattern of a class and as much of a pattern of their own."""
    samples = whole("samples", samples, "the number of samples", least=1)
    generator = torch.Generator().manual_seed(seed)

    def patterns(count: int) -> torch.Tensor:
        coarse = torch.randn(count, shape[0], _COARSE, _COARSE, generator=generator)
        return torch.nn.functional.interpolate(coarse, size=shape[1:], mode="bilinear", align_corners=False)

    y = torch.randint(classes, (samples,), generator=generator)
    x = patterns(classes)[y] + patterns(samples)
    return Split((127.5 + 50 * x).clamp(0, 255).to(torch.uint8), y)
