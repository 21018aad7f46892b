"""Random views of images, for learning by comparing them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812, the name everybody knows
from torch import Tensor

from modelmix.data.dataset import to_float
from modelmix.features.chance import Chance

SIDE = 32
"""Pixels of a view."""

_LUMA = (0.299, 0.587, 0.114)


def views(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return one random crop of every image, perhaps mirrored, recoloured or grey, as floats 32 x 32."""
    n, device = images.shape[0], images.device

    uniform = Chance(generator).uniform

    area, ratio = uniform(n, low=0.15), uniform(n, low=math.log(3 / 4), high=math.log(4 / 3)).exp()
    width, height = ((area * ratio).sqrt().clamp_max(1), (area / ratio).sqrt().clamp_max(1))
    mirror = torch.where(uniform(n) < 0.5, -1.0, 1.0)
    move = uniform(2, n, low=-1.0)
    affine = torch.zeros(n, 2, 3, device=device)
    affine[:, 0, 0], affine[:, 1, 1] = width * mirror, height
    affine[:, 0, 2], affine[:, 1, 2] = move[0] * (1 - width), move[1] * (1 - height)
    grid = F.affine_grid(affine, [n, 3, SIDE, SIDE], align_corners=False)
    x = F.grid_sample(images.float() / 255, grid, padding_mode="reflection", align_corners=False)
    luma = torch.tensor(_LUMA, device=device).view(1, 3, 1, 1)
    grey = (x * luma).sum(1, keepdim=True)
    keep = torch.where(uniform(n, 1, 1, 1) < 0.2, 0.0, uniform(n, 1, 1, 1, low=0.4, high=1.6))
    x = grey + keep * (x - grey)
    x = x + 0.1 * (2 * uniform(n, 3, 1, 1) - 1)  # a cast of colour
    mean = x.mean((1, 2, 3), keepdim=True)
    x = (mean + uniform(n, 1, 1, 1, low=0.4, high=1.6) * (x - mean)) * uniform(n, 1, 1, 1, low=0.6, high=1.4)
    return to_float((255 * x.clamp(0, 1)).round().to(torch.uint8))
