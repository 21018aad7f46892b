"""Features of images from a network that is not trained any more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812, the name everybody knows
from torch import Tensor

from modelmix.data.dataset import to_float
from modelmix.errors import ModelMixError
from modelmix.features.inputs import require_images, where
from modelmix.models.residual import WideResNet16
from modelmix_lab.features.weights import Prior

_SMALLEST = 16  # pixels of a side
_AT_ONCE = {"cpu": 64, "cuda": 2048}


@dataclass(frozen=True, eq=False)
class Frozen:
    """What a prior sees in an image: its second and its last maps, averaged over the quarters of the image,
    summed over the image and, with ``mirror``, its mirror image.

    4 * (128 + 256) = 1,536 numbers for a WRN-16-4, scaled to the length 1: a function of one image alone.
    """

    prior: Prior
    device: torch.device | str | None = None
    mirror: bool = True

    name: ClassVar[str] = "prior"
    version: ClassVar[int] = 2  # count up whenever the features of any image change

    @property
    def parameters(self) -> dict[str, object]:
        """All that the features depend on, besides the images and the version."""
        return {"weights": self.prior.digest, "mirror": self.mirror}

    def shape(self, images: Tensor) -> tuple[int, ...]:
        """Return the shape of the features of ``images``; refuse what the network does not take."""
        require_images(images, "a prior")
        if len(images) == 0 or min(images.shape[2:]) < _SMALLEST:
            raise ModelMixError(f"a prior needs one or more images of {_SMALLEST} pixels a side or more.")
        return len(images), 4 * 96 * self.prior.config.width

    def batches(self, images: Tensor) -> Iterator[Tensor]:
        """Yield the features of the images batch by batch, float32 on the device."""
        self.shape(images)
        device = where(self.device)
        network = self._network.to(device)
        with torch.no_grad():
            for batch in torch.split(images, _AT_ONCE.get(device.type, 64)):
                x = to_float(batch.to(device))
                seen = [network.maps(view.expand(-1, 3, -1, -1)) for view in ((x, x.flip(3)) if self.mirror else (x,))]
                quarters = [
                    torch.stack([F.adaptive_avg_pool2d(t, 2).flatten(1) for t in both]).sum(0)
                    for both in zip(*seen, strict=True)
                ]
                yield F.normalize(torch.cat([F.normalize(q, dim=1) for q in quarters], 1), dim=1)

    @cached_property
    def _network(self) -> WideResNet16:
        return self.prior.network()
