"""The features of several transforms beside each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from modelmix.features.cache import Transform

_AT_ONCE = 512


@dataclass(frozen=True, eq=False)
class Joined:
    """The features of several transforms as one row of every image. Whitened, each of them has an equal share."""

    transforms: tuple[Transform, ...]

    version: ClassVar[int] = 1  # count up whenever the features of any image change

    @property
    def lasting(self) -> bool:
        return all(getattr(t, "lasting", True) for t in self.transforms)

    @property
    def name(self) -> str:
        return "-".join(t.name for t in self.transforms)

    @property
    def parameters(self) -> dict[str, object]:
        return {"of": [[t.name, t.version, t.parameters] for t in self.transforms]}

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        like = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
        return tuple(itertools.chain.from_iterable(getattr(t, "blocks", (t.shape(like)[1],)) for t in self.transforms))

    def shape(self, images: Tensor) -> tuple[int, ...]:
        return len(images), sum(t.shape(images)[1] for t in self.transforms)

    def batches(self, images: Tensor) -> Iterator[Tensor]:
        streams = [_in_rows_of(_AT_ONCE, t.batches(images)) for t in self.transforms]
        for pieces in zip(*streams, strict=True):
            yield torch.cat(pieces, 1)


def _in_rows_of(size: int, batches: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the same rows in batches of ``size``."""
    left: Tensor | None = None
    for batch in batches:
        rows = batch.flatten(1) if left is None else torch.cat([left, batch.flatten(1)])
        whole = len(rows) - len(rows) % size
        if whole:
            yield from torch.split(rows[:whole], size)
        left = rows[whole:]
    if left is not None and len(left):
        yield left
