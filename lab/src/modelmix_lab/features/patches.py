"""Features of patches: how much every part of an image resembles patches of synthetic images.

One and two layers of filters that nobody trained: they are patches of synthetic images, compared with every patch of an
image after contrast is taken out and both are whitened (after Coates, Ng and Lee 2011, who take filters from the data;
and convolutional kernel networks, Mairal 2016). No real image is needed to build them, so they cost no privacy, and
the features of an image depend on that image alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812, the name everybody knows
from torch import Tensor

from modelmix.errors import ModelMixError
from modelmix.features.inputs import require_images, where
from modelmix_lab.synthetic.synthetic import synthetic

_SIDE = 32
_SOURCES = 1536  # synthetic images that filters are cut from
_CUT = 60_000  # patches that statistics are taken of
_GRID, _WIDTH = 3, 0.7  # features are averages around the points of a grid, of this width in its steps
_THRESHOLD = 0.1  # a response counts beyond it
_RIDGE = 0.1  # of the mean variance, added before whitening
_COMPONENTS = 256  # that are left of the second layer's patches
_AT_ONCE = {"cpu": 16, "cuda": 512}
_SINGLE = ((256, 5, 1), (96, 8, 2))  # filters, side and step of the blocks of one layer
_FIRST, _SECOND = (128, 3, 1), 384  # the block of two


@dataclass(frozen=True, eq=False)
class Patches:
    """3 x 3 averages of rectified responses, both signs, of an image and its mirror image; square roots.

    13,248 numbers in three blocks: 256 filters of 5 x 5 pixels; 96 of 8 x 8; 384 of 3 x 3 x 256 averages of the
    responses to 128 of 3 x 3.

    Args:
        device: where to compute; the accelerator if there is one.
        mirror: whether the mirror image is seen as well, for images whose meaning does not change with it.
        seed: of synthetic images and of the choice of filters.
    """

    device: torch.device | str | None = None
    mirror: bool = True
    seed: int = 0

    name: ClassVar[str] = "patches"
    version: ClassVar[int] = 1  # count up whenever the features of any image change

    @property
    def parameters(self) -> dict[str, object]:
        """All that the features depend on, besides the images and the version."""
        return {"seed": self.seed, "mirror": self.mirror}

    @property
    def blocks(self) -> tuple[int, ...]:
        """Features of each kind, which stand together."""
        return tuple(2 * _GRID**2 * filters for filters in (*(single[0] for single in _SINGLE), _SECOND))

    def shape(self, images: Tensor) -> tuple[int, ...]:
        """Return the shape of the features of ``images``; refuse what they do not exist for."""
        require_images(images, "patches")
        if len(images) == 0 or min(images.shape[2:]) != max(images.shape[2:]) or images.shape[2] != _SIDE:
            raise ModelMixError(
                f"patches are compared in images of {_SIDE} x {_SIDE} pixels: scale them "
                f"(--set data.image_size={_SIDE} for a folder)."
            )
        return len(images), sum(self.blocks)

    def batches(self, images: Tensor) -> Iterator[Tensor]:
        """Yield the features of the images batch by batch, float32 on the device."""
        self.shape(images)
        device = where(self.device)
        network = self._network.to(device)
        with torch.no_grad():
            for batch in torch.split(images, _AT_ONCE.get(device.type, 16)):
                x = batch.to(device).expand(-1, 3, -1, -1).float() / 255
                seen = network(x)
                yield (seen + network(x.flip(3)) if self.mirror else seen).sqrt()

    @cached_property
    def _network(self) -> _Network:
        return _Network(self.seed)


class _Network:
    """The three blocks. Built on the processor, where random numbers are the same on every machine."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator("cpu").manual_seed(seed)
        images = synthetic(_SOURCES, _SIDE, generator).float() / 255
        self.single = [_Filters(images, *setting, generator) for setting in _SINGLE]
        self.first = _Filters(images, *_FIRST, generator)
        self.windows = [_windows(filters.side) for filters in self.single]
        self.boxes, side = _boxes(self.first.side)
        self.last = _windows(side - 2)
        self.side = side
        patches = torch.cat([self._between(some) for some in torch.split(images, 16)]).flatten(0, 1)
        patches = patches[torch.randperm(len(patches), generator=generator)[: _CUT // 2]]
        self.mean = patches.mean(0)
        values, vectors = torch.linalg.eigh(torch.cov(patches.T.double()))
        kept = values[-_COMPONENTS:]
        self.white = (vectors[:, -_COMPONENTS:] / (kept + _RIDGE * kept.mean()).sqrt()).float()
        self.second = F.normalize((patches[:_SECOND] - self.mean) @ self.white, dim=1).T.contiguous()

    def to(self, device: torch.device) -> _Network:
        for filters in (*self.single, self.first):
            filters.to(device)
        self.windows = [window.to(device) for window in self.windows]
        for name in ("boxes", "last", "mean", "white", "second"):
            setattr(self, name, getattr(self, name).to(device))
        return self

    def __call__(self, x: Tensor) -> Tensor:
        found = [
            _averages(filters(x), _THRESHOLD, window) for filters, window in zip(self.single, self.windows, strict=True)
        ]
        deep = F.normalize((self._between(x) - self.mean) @ self.white, dim=-1) @ self.second
        return torch.cat([block.flatten(1) for block in (*found, _averages(deep, 0.0, self.last))], 1)

    def _between(self, x: Tensor) -> Tensor:
        """Return patches of 3 x 3 averages of the first layer, each of length 1."""
        maps = _averages(self.first(x), _THRESHOLD, self.boxes).sqrt()
        return F.normalize(_cut(maps.transpose(1, 2).reshape(len(x), -1, self.side, self.side), 3), dim=-1)


class _Filters:
    """Responses of patches of pixels to whitened patches of synthetic images."""

    def __init__(self, images: Tensor, count: int, size: int, step: int, generator: torch.Generator) -> None:
        self.size, self.step, self.side = size, step, (_SIDE - size) // step + 1
        which = torch.randint(len(images), (_CUT, 1, 1, 1), generator=generator)
        top, left = torch.randint(_SIDE + 1 - size, (2, _CUT, 1, 1, 1), generator=generator)
        colour, along = torch.arange(3).view(3, 1, 1), torch.arange(size)
        patches = images[which, colour, top + along[:, None], left + along].flatten(1)
        patches = _without_contrast(patches)
        self.mean = patches.mean(0)
        values, vectors = torch.linalg.eigh(torch.cov(patches.T.double()))
        scale = (values.clamp_min(0) + _RIDGE * values.mean()).rsqrt()
        self.white = ((vectors * scale) @ vectors.T).float()
        self.filters = F.normalize((patches[:count] - self.mean) @ self.white, dim=1).T.contiguous()

    def to(self, device: torch.device) -> None:
        self.mean, self.white, self.filters = (t.to(device) for t in (self.mean, self.white, self.filters))

    def __call__(self, x: Tensor) -> Tensor:
        """Return cosines, N x positions x filters."""
        patches = (_without_contrast(_cut(x, self.size, self.step)) - self.mean) @ self.white
        return F.normalize(patches, dim=-1) @ self.filters


def _without_contrast(patches: Tensor) -> Tensor:
    centred = patches - patches.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt()


def _cut(x: Tensor, size: int, step: int = 1) -> Tensor:
    """Return all patches, N x positions x values. Windows by strides: F.unfold launches one kernel a sample."""
    windows = x.unfold(2, size, step).unfold(3, size, step)
    return windows.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


def _averages(responses: Tensor, threshold: float, window: Tensor) -> Tensor:
    """Average relu(r - threshold) and relu(-r - threshold): N x windows x (2 filters)."""
    return torch.cat([window @ (sign * responses - threshold).clamp_min(0) for sign in (1, -1)], 2)


def _windows(side: int) -> Tensor:
    """Return the weights of overlapping Gaussian averages around the points of a grid, grid^2 x side^2."""
    at, middle = (torch.arange(side) + 0.5) / side, (torch.arange(_GRID) + 0.5) / _GRID
    weight = torch.exp(-(((at[:, None] - middle) * _GRID) ** 2) / (2 * _WIDTH**2))
    weight = weight / weight.sum(0)
    return torch.einsum("ia,jb->abij", weight, weight).reshape(_GRID**2, side**2)


def _boxes(side: int, size: int = 5, step: int = 3) -> tuple[Tensor, int]:
    """Return the weights of averages over squares, m^2 x side^2, and m."""
    m = (side - size) // step + 1
    weight = torch.zeros(m, side)
    for i in range(m):
        weight[i, i * step : i * step + size] = 1 / size
    return torch.einsum("ai,bj->abij", weight, weight).reshape(m * m, side**2), m
