"""Augmentations of image batches N x C x H x W, for several copies of every sample."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812, the name everybody knows
from torch import Tensor


def flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirrors every image left to right with probability one half."""
    coin = torch.rand(images.shape[0], generator=generator, device=generator.device) < 0.5
    return torch.where(coin.to(images.device)[:, None, None, None], images.flip(-1), images)


def crop(images: Tensor, generator: torch.Generator, pad: int = 4) -> Tensor:
    """Moves every image by up to ``pad`` pixels in each direction; what comes in is zero."""
    n, _, height, width = images.shape
    padded = F.pad(images, (pad, pad, pad, pad))
    offset = torch.randint(2 * pad + 1, (2, n), generator=generator, device=generator.device).to(images.device)
    row = offset[0][:, None] + torch.arange(height, device=images.device)
    column = offset[1][:, None] + torch.arange(width, device=images.device)
    sample = torch.arange(n, device=images.device)
    return padded[sample[:, None, None], :, row[:, :, None], column[:, None, :]].permute(0, 3, 1, 2).contiguous()


def flip_and_crop(images: Tensor, generator: torch.Generator) -> Tensor:
    """Both: the usual augmentation of small natural images."""
    return crop(flip(images, generator), generator)


AUGMENTATIONS = {"flip": flip, "crop": crop, "flip-crop": flip_and_crop}
