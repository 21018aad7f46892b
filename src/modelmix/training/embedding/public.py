"""Public samples, whose gradients suggest directions."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from modelmix._checks import whole
from modelmix.errors import ModelMixError
from modelmix.training.sampling import TensorSource


class Embedding:
    """Public samples and the size of the basis that they give.

    Guarantee: none is needed. The samples must be public: epsilon says nothing about them.

    Args:
        public: (inputs, targets) of samples as the model takes them. Targets need not mean anything: see
            ``random_labels``.
        size: basis vectors in all.
        groups: contiguous parts of the flat parameter vector, of equal sizes, each with a basis of its own. The
            numbers of basis vectors are in proportion to the square roots of their sizes.
    """

    def __init__(self, public: tuple[Any, Any], size: int = 1000, groups: int = 3) -> None:
        self.source = TensorSource(*public)
        self.size = whole("size", size, "the number of basis vectors", least=1)
        self.groups = whole("groups", groups, "the number of groups", least=1)
        self._here: tuple[Any, Any] | None = None
        if self.source.n == 0:
            raise ModelMixError("there is no public sample: gradient embedding needs some.")

    def as_dict(self) -> dict[str, Any]:
        """What a resumed run must have again."""
        digest = hashlib.sha256()
        for leaf in tree_leaves((self.source.inputs, self.source.targets)):
            digest.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return {"size": self.size, "groups": self.groups, "samples": self.source.n, "public": digest.hexdigest()}

    def chunks(self, size: int, device: torch.device, padded: bool = False) -> Iterator[tuple[Any, Any, int]]:
        """All public samples, at most ``size`` at a time and equally many, as far as that goes; padding makes it so.

        Each time with their number, padding not counted.
        """
        size, here = -(-self.source.n // -(-self.source.n // size)), self._on(device)
        for start in range(0, self.source.n, size):
            count = min(size, self.source.n - start)
            taken = torch.arange(start, start + (size if padded else count), device=device) % self.source.n
            inputs, targets = tree_map(lambda t, at=taken: t[at], here)
            yield inputs, targets, count

    def _on(self, device: torch.device) -> Any:
        """The samples on a device, sent there once for all steps unless someone writes to them."""
        own = self.source.inputs, self.source.targets
        stamp = device, [t._version for t in tree_leaves(own)]
        if self._here is None or self._here[0] != stamp:
            self._here = stamp, tree_map(lambda t: t.to(device), own)
        return self._here[1]

    def layout(self, coordinates: int) -> list[tuple[slice, int]]:
        """(part of the flat vector, basis vectors) of every group."""
        if self.groups > coordinates:
            raise ModelMixError(f"groups = {self.groups} is too many for {coordinates} coordinates.")
        parts = [slice(a, b) for a, b in pairwise(coordinates * i // self.groups for i in range(self.groups + 1))]
        roots = [math.sqrt(part.stop - part.start) for part in parts]
        wanted = [max(1, int(self.size * root / sum(roots) + 1e-9)) for root in roots]
        # More vectors than coordinates there cannot be, and more than samples say nothing.
        return [(part, min(k, part.stop - part.start, self.source.n)) for part, k in zip(parts, wanted, strict=True)]


def random_labels(count: int, classes: int, seed: int = 0) -> Tensor:
    """Fixed labels for public samples: any will do, since it is the directions of gradients that are wanted."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(classes, (count,), generator=generator, device="cpu")
