"""From the pixels of a data set to what a pretrained network was trained on: its size, its scale, three colours."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812, the name everybody knows
from torch import Tensor

from modelmix._checks import whole
from modelmix.errors import ModelMixError

Colours = tuple[float, float, float]

SCALES: dict[str, tuple[Colours, Colours]] = {
    "imagenet": ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375)),
    "signed": ((127.5,) * 3, (127.5,) * 3),
    "unit": ((0.0,) * 3, (255.0,) * 3),
    "raw": ((0.0,) * 3, (1.0,) * 3),
}
"""name -> (mean, deviation) of every colour, in grey levels 0 to 255. Constants of the network, not of the data."""


def where(device: torch.device | str | None) -> torch.device:
    """Return the given device, else the GPU if there is one."""
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def require_images(images: Tensor, taker: str) -> None:
    """Refuse what is not a stack of images, grey or in colour."""
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ModelMixError(
            f"images are {images.dtype} with shape {tuple(images.shape)}: {taker} takes uint8 N x C x H x W with 1 or "
            "3 colours."
        )


@dataclass(frozen=True)
class Inputs:
    """What a network takes, as a function of each image alone.

    Args:
        size: the side in pixels to which images are resized (bicubic, to a square); None leaves them as they are.
        pixels: one of ``SCALES``: "imagenet" is ImageNet's mean and deviation, "signed" is -1 to 1, "unit" 0 to 1,
            "raw" 0 to 255.
    """

    size: int | None = None
    pixels: str = "imagenet"

    def __post_init__(self) -> None:
        if self.pixels not in SCALES:
            raise ModelMixError(f"pixels = {self.pixels!r} is unknown: choose one of {', '.join(SCALES)}.")
        if self.size is not None:
            whole("feature_size", self.size, "the side of an image for the network", least=1)

    @property
    def parameters(self) -> dict[str, object]:
        return {"size": self.size, "pixels": self.pixels}

    def __call__(self, images: Tensor) -> Tensor:
        """Convert uint8 N x C x H x W, C 1 or 3, to float32 N x 3 x size x size."""
        x = self.resize(images)
        mean, deviation = (torch.tensor(v, device=x.device).view(3, 1, 1) for v in SCALES[self.pixels])
        return (x - mean) / deviation

    def resize(self, images: Tensor) -> Tensor:
        """Resize to N x 3 x size x size: grey levels 0 to 255 as float32."""
        x = images.float().expand(-1, 3, -1, -1)
        if self.size is None or tuple(x.shape[2:]) == (self.size, self.size):
            return x
        return F.interpolate(x, (self.size, self.size), mode="bicubic", antialias=True).clamp(0, 255)
