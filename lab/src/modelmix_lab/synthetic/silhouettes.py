"""Synthetic images: one thing on a black ground, in the middle, as large as the image. For data that looks so.

The outline is a union of leaves, less a few; most are their own mirror image. The inside is a random painting, often
faint.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812, the name everybody knows
from torch import Tensor

from modelmix.features.leaves import rotate
from modelmix_lab.synthetic.textures import paint_textures

_PARTS = 6
_MIRRORED = 0.65  # share of outlines that are symmetric


def silhouettes(count: int, side: int, generator: torch.Generator) -> Tensor:
    """Draw ``count`` grey images, uint8 N x 3 x side x side, on the generator's device."""
    device = generator.device

    def uniform(low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(count, 1, 1, generator=generator, device=device)

    fine = 2 * side
    axis = 2 * (torch.arange(fine, device=device) + 0.5) / fine - 1
    y = axis[None, :, None]
    x = torch.where(uniform() < _MIRRORED, axis.abs(), axis)
    outline = torch.zeros(count, fine, fine, dtype=torch.bool, device=device)
    for part in range(_PARTS):
        first = part == 0
        right, down = (uniform(-0.15, 0.15), uniform(-0.2, 0.2)) if first else (uniform(-0.9, 0.9), uniform(-1, 1))
        wide, high = (uniform(0.2, 0.8), uniform(0.25, 1.0)) if first else (uniform(0.07, 0.45), uniform(0.1, 0.9))
        turn = (0.15 if first else 0.4) * torch.randn(count, 1, 1, generator=generator, device=device)
        k = (2.0 ** torch.randint(0, 4, (count, 1, 1), generator=generator, device=device)).clamp_min(1.5)
        along, across = rotate(x - right, y - down, turn)
        inside = (along / wide).abs() ** k + (across / high).abs() ** k < 1
        if not first:
            inside &= uniform() < 0.6
        outline = torch.where(uniform() < (0.35 if part > 1 else 0.0), outline & ~inside, outline | inside)
    shape = _filling(outline.float(), side)
    light = paint_textures(count, side, generator)[:, 0].float() / 255
    own = uniform() ** 2 * (light - light.mean((1, 2), keepdim=True))
    grey = ((uniform(0.15, 1.0) + own).clamp(0.02, 1) * shape * 255).round().to(torch.uint8)
    return grey[:, None].expand(-1, 3, -1, -1).contiguous()


def _filling(outline: Tensor, side: int) -> Tensor:
    """Move outlines to the middle and scale them until they touch two edges; N x side x side, soft at the edge."""
    fine = outline.shape[1]
    at = torch.arange(fine, device=outline.device)
    ends = []
    for dim in (1, 2):  # columns, rows
        there = outline.amax(dim) > 0
        ends.append((torch.where(there, at, fine).amin(1), torch.where(there, at, -1).amax(1)))
    half = torch.stack([last - first for first, last in ends]).amax(0).clamp(4, fine) / 2 + 1
    affine = torch.zeros(len(outline), 2, 3, device=outline.device)
    for i, (first, last) in enumerate(ends):
        affine[:, i, i] = 2 * half / fine
        affine[:, i, 2] = ((first + last) / 2 - fine / 2 + 0.5) / (fine / 2)
    grid = F.affine_grid(affine, [len(outline), 1, fine, fine], align_corners=False)
    return F.avg_pool2d(F.grid_sample(outline[:, None], grid, align_corners=False), 2)[:, 0]
