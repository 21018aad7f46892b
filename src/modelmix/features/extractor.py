"""Features from any function of images, in the form that is cached: checked, in batches, of unit length if wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812, the name everybody knows
from torch import Tensor

from modelmix._imports import one_line
from modelmix.errors import ModelMixError
from modelmix.features.independence import check_independence


@dataclass(frozen=True, eq=False)
class Extractor:
    """A function of each image alone as a ``Transform``.

    Before it sees any data it is held to ``check_independence``; what it returns must be finite.

    Args:
        name: the kind of function, the beginning of the names of its caches.
        source: what errors call it.
        function: uint8 images N x C x H x W, on the CPU, to N x ... numbers.
        identity: all that the features depend on, as far as it can be known: hashes of weights and the like.
        unit_length: scales every image's features to the length 1, which costs nothing: it is done to each alone.
        at_once: images in a batch.
        mirror: adds the features of the mirror image, for images whose meaning does not change with it.
    """

    name: str
    source: str
    function: Callable[[Tensor], Any]
    identity: Mapping[str, object]
    unit_length: bool = False
    at_once: int = 64
    mirror: bool = False
    version: ClassVar[int] = 1  # count up whenever the features of any image change
    _widths: dict[tuple[int, ...], int] = field(default_factory=dict, init=False, repr=False)

    @property
    def parameters(self) -> dict[str, object]:
        """All that the features depend on, besides the images and the version."""
        return {**self.identity, "unit_length": self.unit_length, **({"mirror": True} if self.mirror else {})}

    def shape(self, images: Tensor) -> tuple[int, ...]:
        """Return the shape of the features of ``images``; refuse images and functions that will not do."""
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3) or len(images) == 0:
            raise ModelMixError(
                f"samples are {images.dtype} with shape {tuple(images.shape)}: features {self.source!r} take uint8 "
                "images N x C x H x W with 1 or 3 colours."
            )
        one = tuple(images.shape[1:])
        if one not in self._widths:
            with torch.no_grad():
                self._widths[one] = check_independence(self._features, one, self.source)
        return len(images), self._widths[one]

    def batches(self, images: Tensor) -> Iterator[Tensor]:
        """Yield the features of the images batch by batch, float32 on the CPU."""
        _, width = self.shape(images)
        for batch in torch.split(images, self.at_once):
            with torch.no_grad():
                found = self._features(batch)
            if found.shape[1] != width:
                raise ModelMixError(
                    f"features {self.source!r} returned {found.shape[1]} numbers for an image and {width} for another: "
                    "all images need the same number."
                )
            yield found

    def _features(self, images: Tensor) -> Tensor:
        found = self._seen(images)
        if self.mirror:
            found = found + self._seen(images.flip(3))
        return F.normalize(found, dim=1) if self.unit_length else found

    def _seen(self, images: Tensor) -> Tensor:
        try:
            found = torch.as_tensor(self.function(images)).detach().cpu()
            found = found.flatten(1).float()
        except ModelMixError:
            raise
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever somebody else's code raises
            raise ModelMixError(
                f"features {self.source!r} failed on {len(images)} images {tuple(images.shape[1:])}: "
                f"{one_line(error)}. It must take uint8 images N x C x H x W and return N x d numbers."
            ) from error
        if len(found) != len(images) or found.shape[1] == 0:
            raise ModelMixError(
                f"features {self.source!r} returned shape {tuple(found.shape)} for {len(images)} images: it must "
                "return N x d numbers, a row for every image."
            )
        if not bool(torch.isfinite(found).all()):
            raise ModelMixError(
                f"features {self.source!r} are not finite for some image: check the scale of its inputs, or leave such "
                "images out."
            )
        return found
