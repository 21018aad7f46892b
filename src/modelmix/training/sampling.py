"""Poisson draws, and the samples they name in chunks of one fixed shape.

Every sample enters a step's batch with probability exactly q and on its own coin; one draw a step; an empty draw is a
step like any other. Where shapes must not change, a chunk is padded by repeating a sample of it with weight 0.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from modelmix.errors import ModelMixError, UnprovedError
from modelmix.gradients.device import to_device_async
from modelmix.training.digests import digest_of
from modelmix.training.item_checks import PROBED, arrays_of, copy_for_probing
from modelmix.training.items import Items, SeparateCollate, as_pair, plain_tensor

_ON_DEVICE = 4 * 2**30
POISSON = "every sample enters a batch with probability q, independently of all others and of all other steps"


@dataclass(frozen=True)
class Chunk:
    """Some samples of one draw. ``weights`` is 1 for a drawn sample and 0 for padding."""

    inputs: Any
    targets: Any
    weights: Tensor


def pieces(indices: Tensor, chunk: int, pad: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
    """(indices, weights) of fixed length ``chunk``, or at most that, that cover a draw; none for an empty one."""
    for part in torch.split(indices, chunk):
        if part.numel() == 0:
            return
        missing = chunk - part.numel() if pad else 0
        weights = torch.zeros(part.numel() + missing, dtype=torch.float64, device="cpu")
        weights[: part.numel()] = 1.0
        yield torch.cat([part, part[:1].expand(missing)]), weights


class Prefetched:
    """Draws in their order, of which the next can be made early, while an accelerator is busy with something else."""

    def __init__(self, draws: Iterable[Tensor]) -> None:
        self._draws, self._made = iter(draws), deque[Tensor]()

    def prefetch(self) -> None:
        """Draw the next batch while the GPU is busy, if it is not drawn and there is one."""
        if not self._made:
            self._made.extend(itertools.islice(self._draws, 1))

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        return self._made.popleft() if self._made else next(self._draws)


class TensorSource:
    """Samples that lie in memory as tensors."""

    def __init__(self, inputs: Any, targets: Any) -> None:
        self.inputs, self.targets = tree_map(_tensor, inputs), tree_map(_tensor, targets)
        leaves, _ = tree_flatten((self.inputs, self.targets))
        if any(t.layout != torch.strided or t.is_nested for t in leaves):
            raise ModelMixError("sparse and nested tensors are not supported: give dense ones (x.to_dense()).")
        if not leaves or any(t.dim() == 0 for t in leaves):
            raise ModelMixError("the training set needs inputs and targets with the samples first.")
        sizes = {t.shape[0] for t in leaves}
        if len(sizes) != 1:
            raise ModelMixError(f"inputs and targets have different numbers of samples: {sorted(sizes)}.")
        self.n = sizes.pop()
        self._leaves = leaves
        self._digest: tuple[list[int], bytes] | None = None

    def to(self, device: torch.device) -> TensorSource:
        """The same samples near the accelerator, if they fit."""
        if all(t.device.type == device.type and device.index in (None, t.device.index) for t in self._leaves):
            return self
        if device.type != "cpu" and sum(t.numel() * t.element_size() for t in self._leaves) <= _ON_DEVICE:
            return TensorSource(*tree_map(lambda t: t.to(device), (self.inputs, self.targets)))
        return self

    def arrays(self) -> list[Tensor]:
        """The tensors in which samples lie."""
        return self._leaves

    def head(self, count: int) -> tuple[Any, Any]:
        """The first samples."""
        return tree_map(lambda t: t[:count], self.inputs), tree_map(lambda t: t[:count], self.targets)

    def steps(
        self, draws: Iterable[Tensor], chunk: int, pad: bool = True, seeds: Iterable[int] | None = None
    ) -> Iterator[Iterator[Chunk]]:
        """For every draw, its chunks; nothing here is random, so that seeds are not needed."""
        for indices in draws:
            yield self._chunks(indices, chunk, pad)

    def _chunks(self, indices: Tensor, chunk: int, pad: bool) -> Iterator[Chunk]:
        for index, weights in pieces(indices, chunk, pad):
            there = cache(partial(to_device_async, index))  # once for inputs and targets

            def take(t: Tensor, there: Callable[[torch.device], Tensor] = there) -> Tensor:
                return t[there(t.device)]

            yield Chunk(tree_map(take, self.inputs), tree_map(take, self.targets), weights)

    def fingerprint(self, salt: bytes) -> str:
        """A digest under a secret salt: it recognises the data and tells an outsider nothing."""
        versions = [0 if t.is_inference() else t._version for t in self._leaves]
        if self._digest is None or self._digest[0] != versions:  # gigabytes, and many runs may share them
            self._digest = versions, digest_of(self._leaves)
        return hashlib.blake2b(self._digest[1], key=salt, digest_size=16).hexdigest()

    def repeatable(self) -> str | None:
        """A digest of all samples, if reading them again gives the same ones."""
        return self.fingerprint(b"repeatable")


class DatasetSource:
    """Samples of a map-style ``Dataset``, fetched by worker processes if wanted."""

    def __init__(self, dataset: Dataset[Any], workers: int = 0) -> None:
        self.dataset, self.workers = dataset, workers
        self._digest: str | None = None
        self.n = len(dataset)  # type: ignore[arg-type]
        self.probed = copy_for_probing(dataset) if workers else dataset
        """What this process reads: workers are to open their files themselves, and would share those that are open."""
        self._collate = SeparateCollate(None, Items(self.probed)[0]) if self.n else None

    def to(self, device: torch.device) -> DatasetSource:
        return self

    def arrays(self) -> list[Tensor]:
        """The tensors in which samples lie, as far as they can be found."""
        return arrays_of(self.dataset, self.n)

    def head(self, count: int) -> tuple[Any, Any]:
        assert self._collate is not None
        items = Items(self.probed)
        return as_pair(self._collate([items[i] for i in range(min(count, self.n))])[0])

    def steps(
        self, draws: Iterable[Tensor], chunk: int, pad: bool = True, seeds: Iterable[int] | None = None
    ) -> Iterator[Iterator[Chunk]]:
        """For every draw, its chunks; its items are read with random draws that come from the seed of the draw."""
        # The loader reads ahead, so what it has been asked for waits here until it arrives.
        counts: deque[int] = deque()
        weights: deque[Tensor] = deque()

        def ordered() -> Iterator[list[tuple[int, int]]]:
            for indices, seed in zip(draws, itertools.count() if seeds is None else seeds, strict=False):
                parts = list(pieces(indices, chunk, pad))
                counts.append(len(parts))
                for index, weight in parts:
                    weights.append(weight)
                    yield [(i, seed) for i in index.tolist()]

        batches = LazyBatches(ordered())
        loader = iter(
            DataLoader(Items(self.dataset), batch_sampler=batches, num_workers=self.workers, collate_fn=self._collate)
        )
        arrived: deque[Any] = deque()
        while True:
            while not counts:
                try:
                    arrived.append(next(loader))
                except StopIteration:
                    if counts:
                        break
                    return
            yield self._chunks(counts.popleft(), arrived, loader, weights)

    def _chunks(self, count: int, arrived: deque[Any], loader: Any, weights: deque[Tensor]) -> Iterator[Chunk]:
        for _ in range(count):
            batch, fits = arrived.popleft() if arrived else next(loader)
            assert self._collate is not None
            self._collate.warn_of_misfits(fits)
            inputs, targets = as_pair(batch)
            yield Chunk(inputs, targets, weights.popleft() * fits)

    def repeatable(self) -> str | None:
        """A digest of all samples; None if an item is not the same twice: a ``Dataset`` may augment."""
        if self._digest is None:
            digest, salt = hashlib.blake2b(digest_size=16), b"repeatable"
            for i in range(self.n):
                once, again = (digest_of(self.probed[i], salt) for _ in range(2))
                if once != again:
                    self._digest = ""
                    break
                digest.update(once)
            else:
                self._digest = digest.hexdigest()
        return self._digest or None

    def fingerprint(self, salt: bytes) -> str:
        """Of the number of samples and of some of them, where they are the same twice: a ``Dataset`` may augment."""
        digest = hashlib.blake2b(f"dataset of {self.n}".encode(), key=salt, digest_size=16)
        for i in range(0, self.n, max(1, self.n // PROBED)):
            once, again = (digest_of(self.probed[i], salt) for _ in range(2))
            digest.update(once if once == again else b"changing")
        return digest.hexdigest()


Source = TensorSource | DatasetSource


class LazyBatches:
    """Lets a loader take batches from a generator as it needs them."""

    def __init__(self, batches: Iterator[list[tuple[int, int]]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self._batches


def as_source(data: Any, workers: int = 0) -> Source:
    """A source from (inputs, targets), a ``TensorDataset`` of two tensors, or any map-style ``Dataset``."""
    if isinstance(data, TensorSource | DatasetSource):
        return data
    if isinstance(data, DataLoader):
        raise UnprovedError(
            POISSON,
            "a DataLoader brings its own batches.",
            "Give the dataset itself (loader.dataset), or keep your loop and use make_private.",
        )
    if isinstance(data, IterableDataset):
        raise UnprovedError(
            POISSON,
            "an IterableDataset decides itself which sample comes next.",
            "Give a map-style dataset, with __len__ and __getitem__.",
        )
    if type(data) is TensorDataset and len(data.tensors) == 2:
        data = data.tensors
    if hasattr(data, "x") and hasattr(data, "y") and not hasattr(data, "__getitem__"):
        data = (data.x, data.y)
    if isinstance(data, tuple | list) and len(data) == 2:
        source: Source = TensorSource(*data)
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        source = DatasetSource(data, workers)
    else:
        raise ModelMixError(
            f"{type(data).__name__} is not a training set: give (inputs, targets) or a dataset with __len__ and "
            "__getitem__."
        )
    if source.n == 0:
        raise ModelMixError("the training set is empty: it needs at least one sample.")
    return source


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        plain: Tensor = plain_tensor(value)
        return plain
    try:
        return torch.from_numpy(np.ascontiguousarray(value))
    except TypeError:
        raise ModelMixError(f"{type(value).__name__} cannot be a tensor: give tensors or arrays of numbers.") from None
