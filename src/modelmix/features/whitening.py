"""Features in directions in which synthetic or public images vary alike: what a linear model learns in few steps.

Steps of private training are dear, and a linear model needs many where features are correlated. Correlations of the
training images are private. Those of other images are not and resemble them: features are centred and whitened by the
mean and covariance of the features of synthetic images, or of public ones. No private image is looked at, so this
costs nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812, the name everybody knows
from torch import Tensor

from modelmix._checks import whole
from modelmix.errors import ModelMixError
from modelmix.features.cache import Transform, log_progress
from modelmix.kinds import IMAGES

LENGTH = 5.0
"""Of the features of every image. The bias of a linear model has the input 1: a 26th of a gradient's square is its."""

_COUNT = 8000
_RIDGE = 2e-4  # of the whole variance, added to the variance of every direction
_PUBLIC_RIDGE = 3e-3  # public images are fewer and know less of the directions in which they vary little
_VARIES = 1e-5  # of their mean, below which features differ by rounding and no more
_LARGEST = 64  # pixels of a side that are painted; larger images are these, enlarged
_AT_ONCE = 500
_SMALL = 0.005  # where the logarithm of a scattering coefficient begins to bend


@dataclass(frozen=True, eq=False)
class Whitened:
    """The features of a transform, centred, whitened by images that are not private and scaled to length 5.

    Another processor may find other directions in the same images: features that are to be used together must come
    from one call.

    Args:
        transform: of images.
        images: a name of ``modelmix.kinds.IMAGES``; or public images, uint8 of the shape of those that are transformed.
        components: how many directions are kept, those of largest variance.
    """

    transform: Transform
    images: str | Tensor
    components: int

    version: ClassVar[int] = 1  # count up whenever the features of any image change
    lasting: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if isinstance(self.images, str) and self.images not in IMAGES:
            raise ModelMixError(f"there are no synthetic {self.images!r}: choose {' or '.join(IMAGES)}.")
        whole("components", self.components, "the number of components", 1)

    @property
    def name(self) -> str:
        return f"whitened-{self.transform.name}"

    @property
    def parameters(self) -> dict[str, object]:
        """All that the features depend on, besides the images and the version."""
        inner = [self.transform.name, self.transform.version, self.transform.parameters]
        images = self.images
        if not isinstance(images, str):
            images = hashlib.sha256(images.contiguous().numpy().tobytes()).hexdigest()
        return {
            "of": inner,
            "images": images,
            "components": self.components,
            "count": self._count,
            "ridge": self._ridge,
        }

    @property
    def _count(self) -> int:
        return _COUNT if isinstance(self.images, str) else len(self.images)

    @property
    def _ridge(self) -> float:
        return _RIDGE if isinstance(self.images, str) else _PUBLIC_RIDGE

    def shape(self, images: Tensor) -> tuple[int, ...]:
        """Return the shape of the features of ``images``; refuse what has fewer features than components."""
        n, *features = self.transform.shape(images)
        most = min(self._count - 1, torch.Size(features).numel())
        if self.components > most:
            raise ModelMixError(
                f"components = {self.components} is more than {self._count} images with {torch.Size(features).numel()} "
                f"features tell apart: give {most} or fewer."
            )
        return n, self.components

    def batches(self, images: Tensor) -> Iterator[Tensor]:
        """Yield the features of the images batch by batch, float32 on the device."""
        self.shape(images)
        mean, rows = self._directions(images[:1])
        for batch in self.transform.batches(images):
            yield LENGTH * F.normalize((batch.flatten(1) - mean) @ rows.T, dim=1)

    def _directions(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean of features of public or synthetic images, and the directions over their deviations."""
        colours, *size = like.shape[1:]
        side = max(size)
        if isinstance(self.images, str):
            seen = IMAGES[self.images](_COUNT, min(side, _LARGEST), torch.Generator("cpu").manual_seed(0))[:, :colours]
            features = log_progress(f"synthetic {self.images}", _COUNT, _sized(self.transform, seen, side, size))
        else:
            features = log_progress("public images", self._count, self.transform.batches(self.images))
        with torch.no_grad():
            x = torch.cat([batch.flatten(1) for batch in features])
            mean = x.mean(0)
            x -= mean
            blocks: Sequence[int] = getattr(self.transform, "blocks", (x.shape[1],))
            # Every block has its share of a variance of 1.
            share = (len(x) / len(blocks)) ** 0.5
            parts = torch.split(x, list(blocks), 1)
            for part, middle in zip(parts, torch.split(mean, list(blocks)), strict=True):
                if not bool(part.square().sum() > _VARIES**2 * len(x) * middle.square().sum()):
                    raise ModelMixError("features of the images that whiten do not vary: give images that differ.")
            scale = torch.cat([share * part.square().sum().rsqrt().expand(part.shape[1]) for part in parts])
            x *= scale
            if len(x) < x.shape[1]:  # by products of images, of which there are fewer than features
                values, vectors = torch.linalg.eigh(x @ x.T / len(x))
                vectors = x.T @ (vectors / (values.clamp_min(1e-9) * len(x)).sqrt())
            else:
                values, vectors = torch.linalg.eigh(x.T @ x / len(x))
            kept, along = values[-self.components :].clamp_min(0), vectors[:, -self.components :]
            rows = (along / (kept + self._ridge).sqrt()).T * scale
        return mean, rows


def _sized(transform: Transform, images: Tensor, side: int, size: Sequence[int]) -> Iterator[Tensor]:
    """Yield the features of square images, enlarged to ``side`` if they are smaller and cut to ``size``."""
    for some in torch.split(images, _AT_ONCE):
        if some.shape[-1] != side:
            some = F.interpolate(some.float(), (side, side), mode="bilinear").round().to(torch.uint8)
        yield from transform.batches(some[..., : size[0], : size[1]].contiguous())


@dataclass(frozen=True, eq=False)
class _Bent:
    """The features of a transform, flattened and bent one by one: large ones do not outshine the others."""

    transform: Transform

    version: ClassVar[int] = 1  # count up whenever the features of any image change

    @property
    def parameters(self) -> dict[str, object]:
        return {"of": [self.transform.name, self.transform.version, self.transform.parameters]}

    def shape(self, images: Tensor) -> tuple[int, ...]:
        n, *features = self.transform.shape(images)
        return n, torch.Size(features).numel()

    def batches(self, images: Tensor) -> Iterator[Tensor]:
        for batch in self.transform.batches(images):
            yield self._bent(batch.flatten(1))

    def _bent(self, features: Tensor) -> Tensor:
        raise NotImplementedError


class Logarithm(_Bent):
    """Logarithms of the features of a transform, scaled to length 1."""

    @property
    def name(self) -> str:
        return f"log-{self.transform.name}"

    @property
    def parameters(self) -> dict[str, object]:
        return {**super().parameters, "small": _SMALL}

    def _bent(self, features: Tensor) -> Tensor:
        return F.normalize(features.sign() * torch.log1p(features.abs() / _SMALL), dim=1)


class Root(_Bent):
    """Square roots of the features of a transform, with their signs: of networks', many are small and few large."""

    @property
    def name(self) -> str:
        return f"root-{self.transform.name}"

    def _bent(self, features: Tensor) -> Tensor:
        return features.sign() * features.abs().sqrt()
