"""Poisson draws, and the samples they name in chunks of one fixed shape.

Every sample enters a step's batch with probability exactly q and on its own coin; one draw a step; an empty draw is a
step like any other. Where shapes must not change, a chunk is padded by repeating a sample of it with weight 0.
"""

from __future__ import annotations

import copy
import hashlib
import io
import itertools
import pickle
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from modelmix.errors import ModelMixError, UnprovedError
from modelmix.gradients.device import preserve_torch_rng, to_device_async
from modelmix.gradients.memory import ALONE, WatchedFunction, reachable

_ON_DEVICE = 4 * 2**30
_LOOKED_AT = 16
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


class Ahead:
    """Draws in their order, of which the next can be made early, while an accelerator is busy with something else."""

    def __init__(self, draws: Iterable[Tensor]) -> None:
        self._draws, self._made = iter(draws), deque[Tensor]()

    def look(self) -> None:
        """Makes the next draw, if it is not made and there is one."""
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
            self._digest = versions, _digest_of(self._leaves)
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
        self.looked_at = copy_to_look_at(dataset) if workers else dataset
        """What this process reads: workers are to open their files themselves, and would share those that are open."""
        self._collate = SeparateCollate(None, Items(self.looked_at)[0]) if self.n else None

    def to(self, device: torch.device) -> DatasetSource:
        return self

    def arrays(self) -> list[Tensor]:
        """The tensors in which samples lie, as far as they can be found."""
        return arrays_of(self.dataset, self.n)

    def head(self, count: int) -> tuple[Any, Any]:
        assert self._collate is not None
        items = Items(self.looked_at)
        return _pair(self._collate([items[i] for i in range(min(count, self.n))])[0])

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

        batches = _Lazy(ordered())
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
            self._collate.say_what_does_not_fit(fits)
            inputs, targets = _pair(batch)
            yield Chunk(inputs, targets, weights.popleft() * fits)

    def repeatable(self) -> str | None:
        """A digest of all samples; None if an item is not the same twice: a ``Dataset`` may augment."""
        if self._digest is None:
            digest, salt = hashlib.blake2b(digest_size=16), b"repeatable"
            for i in range(self.n):
                once, again = (_digest_of(self.looked_at[i], salt) for _ in range(2))
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
        for i in range(0, self.n, max(1, self.n // _LOOKED_AT)):
            once, again = (_digest_of(self.looked_at[i], salt) for _ in range(2))
            digest.update(once if once == again else b"changing")
        return digest.hexdigest()


Source = TensorSource | DatasetSource


class _Lazy:
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


def _digest_of(sample: Any, salt: bytes = b"") -> bytes:
    digest = hashlib.blake2b(key=salt, digest_size=32)
    for leaf in tree_flatten(sample)[0]:
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            digest.update(_bytes_of_tensor(leaf))
        elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            digest.update(f"{leaf.dtype}{leaf.shape}".encode() + np.ascontiguousarray(leaf).tobytes())
        else:
            digest.update(_bytes_of(leaf))
    return digest.digest()


class _Pickler(pickle.Pickler):
    """Writes tensors down as they are seen, and not with all of the memory that they are a part of."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.layout == torch.strided:
            return bytes, (_bytes_of_tensor(value),)
        return NotImplemented


def _bytes_of(value: Any) -> bytes:
    out = io.BytesIO()
    try:
        _Pickler(out).dump(value)
    except Exception:  # an object that nobody can compare
        return type(value).__qualname__.encode()
    return out.getvalue()


def _bytes_of_tensor(t: Tensor) -> bytes:
    words: bytes = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return words


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        plain: Tensor = _plain(value)
        return plain
    try:
        return torch.from_numpy(np.ascontiguousarray(value))
    except TypeError:
        raise ModelMixError(f"{type(value).__name__} cannot be a tensor: give tensors or arrays of numbers.") from None


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ModelMixError("a sample must be a pair (input, target).")
    return batch[0], batch[1]


_COPIED = 64 * 2**20  # bytes of a dataset that is copied to be tried out
_SEEDS = 4  # a coin of one half falls both ways
_TRIED = 8  # items that are compared
_REPEATED = 20  # times that a change is seen before it is believed: an item may be random in a way of its own


def check_items_alone(dataset: Dataset[Any]) -> None:
    """Refuse a dataset whose items look at other items: normalised by the set's mean, mixed, ranked, or remembered.

    An item is read before and after others, with the same random draws. Then one row of a copy is disturbed, and no
    more than one item may change with it: its own, wherever that stands in the order of the items. It is a probe and no
    proof: what is not kept in tensors or arrays with one row for every item, or cannot be copied, is not seen. Nothing
    but yes or no leaves it.

    Raises:
        UnprovedError: if an item is another one after others were read, or if several items change with one row.
    """
    n = len(dataset)  # type: ignore[arg-type]
    if n < 2:
        return
    _check_items_forget(dataset, n)
    if sum(t.numel() * t.element_size() for t in arrays_of(dataset, n)) > _COPIED:
        return
    twin = copy_to_look_at(dataset)
    if twin is dataset:
        return

    def read(items: Iterable[int]) -> dict[int, bytes]:
        with _same_draws() as begin:
            return {i: _digest_of((begin(), twin[i])[1]) for i in items}

    looked = sorted({*range(0, n, max(1, n // _TRIED)), n - 1})
    once, again = read(looked), read(looked)
    for t, changed in itertools.product(arrays_of(twin, n), (0, n - 1)):
        row = t[changed].clone()
        moved = [i for i in looked if once[i] == again[i]]
        for _ in range(_REPEATED):
            try:
                t[changed] = _another(row, t)
                found = read(moved)
            except Exception:  # not a row that can be exchanged so
                break
            finally:
                t[changed] = row
            back = read(moved)
            moved = [i for i in moved if found[i] != once[i] == back[i]]
            if len(moved) < 2:
                break
        else:
            raise UnprovedError(
                ALONE,
                "an item of the dataset changes with another item.",
                "Compute every item from its own row alone; statistics of the data need budget of their own.",
            )


def _check_items_forget(dataset: Dataset[Any], n: int) -> None:
    """Refuse items that depend on which ones were read before: those are the draw, which is private.

    An item of a fresh copy must be what it is on a copy of which others were read, with the same random draws. Where
    there can be no copies it must be what it was.
    """
    spread = [k * (n - 1) // 9 for k in range(10)]

    def several() -> list[bytes]:
        fresh = copy_to_look_at(dataset)
        return [] if fresh is dataset else [_read(fresh, i, 0) for i in spread]

    if several() != several():
        return  # random by itself, in a way that nobody can repeat
    for seed in range(_SEEDS):
        used = copy_to_look_at(dataset)
        for target in {0, n - 1 - n // 3}:
            fresh = used if used is dataset else copy_to_look_at(dataset)
            first = _read(fresh, target, seed)
            others = (max(0, target - 1), min(n - 1, target + 1), *spread)
            for k, other in enumerate(others[: len(others) - seed % 3]):  # other counts: a generator may have a period
                _read(used, other, seed + k)
            if _read(used, target, seed) != first:
                raise UnprovedError(
                    ALONE,
                    "an item of the dataset is another one after others were read, with the same random draws.",
                    "Compute every item from its own row, keep nothing between reads, and draw from the generators of "
                    "torch, NumPy or Python.",
                )


def copy_to_look_at(dataset: Any) -> Any:
    """A copy of a dataset, if it is small and can be copied, and otherwise the dataset itself."""
    n = len(dataset)
    if sum(t.numel() * t.element_size() for t in arrays_of(dataset, n)) > _COPIED:
        return dataset
    try:
        return copy.deepcopy(dataset)
    except Exception:  # open files, connections
        return dataset


def _read(dataset: Any, i: int, seed: int) -> bytes:
    """Return a digest of an item, read as training reads it, with draws of this seed."""
    return _digest_of(Items(dataset)[i, seed])


_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def own_generators(dataset: Any) -> list[Any]:
    """Return the generators that a dataset brings: on its attributes, in closures, transforms and modules."""
    found = (g for g in reachable(dataset) if isinstance(g, _GENERATORS) and not isinstance(g, random.SystemRandom))
    return list({id(g): g for g in found}.values())


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return copy.deepcopy(generator.bit_generator.state)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed if isinstance(generator, random.Random) else seed % 2**32)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _another(row: Tensor, rows: Tensor) -> Tensor:
    """Return a row that differs from a given one: of whole numbers one that is there, for they may stand for others."""
    if row.is_floating_point() or row.is_complex():
        return torch.where(torch.isfinite(row) & (row != -3), 2 * row + 3, 1.0)
    different = (rows != row).reshape(len(rows), -1).any(1).nonzero()
    if len(different):
        return rows[different[0, 0]].clone()
    return ~row if row.dtype == torch.bool else row + 1


@contextmanager
def seeded(seed: int, generators: Iterable[Any] = ()) -> Iterator[None]:
    """Seed the generators of torch, NumPy and Python that everybody has, and some more; restore all on exit."""
    state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002, what a dataset may draw from
    torch_state = torch.default_generator.get_state()
    kept = [(g, _state_of(g)) for g in generators]
    try:
        for k, (generator, _) in enumerate(kept):
            _seed(generator, (seed + k) % 2**63)
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        for generator, own in kept:
            _set_state(generator, own)


@contextmanager
def _same_draws() -> Iterator[Callable[[], None]]:
    """Give a function that seeds the global generators of torch, NumPy and Python; restore all of them on exit."""
    state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002, what a dataset may draw from

    def begin() -> None:
        torch.default_generator.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002

    try:
        with preserve_torch_rng(torch.device("cpu")):
            yield begin
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)  # noqa: NPY002


def arrays_of(holder: Any, n: int, depth: int = 4, met: set[int] | None = None) -> list[Tensor]:
    """Tensors that a dataset and those within it keep with at least one row for every item."""
    met = set() if met is None else met
    if depth < 0 or id(holder) in met:
        return []
    met.add(id(holder))
    if isinstance(holder, np.ndarray):
        numbers = holder.dtype.kind in "fiub" and holder.flags.writeable
        return [torch.from_numpy(holder)] if numbers and holder.ndim and holder.shape[0] >= n else []
    if isinstance(holder, Tensor):
        return [holder] if holder.dim() and holder.shape[0] >= n and not holder.requires_grad else []
    if isinstance(holder, dict):
        inside: list[Any] = list(holder.values())
    elif isinstance(holder, list | tuple):
        inside = list(holder[:_LOOKED_AT])
    else:
        inside = list(vars(holder).values()) if hasattr(holder, "__dict__") and not callable(holder) else []
    return [t for value in inside for t in arrays_of(value, n, depth - 1, met)]


class Items(Dataset[Any]):
    """The items of a dataset, each read by its own index and with random draws of its own.

    torch gives a whole draw to a dataset that has ``__getitems__``, where samples could meet; this one has none. An
    item that seeds a generator, or uses more of it than others, is nothing to the items after it or to the model. That
    goes for generators of the dataset's own, too: the numbers of ``np.random.default_rng(0)`` are public, and which of
    them an item gets would otherwise hang on how many items were drawn before it. Whatever else is asked of it is asked
    of the dataset.
    """

    def __init__(self, dataset: Any) -> None:
        vars(self)["_dataset"] = dataset
        vars(self)["_generators"] = None  # found at the first read in this process

    def __len__(self) -> int:
        return len(vars(self)["_dataset"])

    def __getitem__(self, item: tuple[int, int] | int) -> Any:
        dataset = vars(self)["_dataset"]
        index, seed = item if isinstance(item, tuple) else (item, 0)
        if type(dataset) is TensorDataset:
            return own_copy(dataset[index])
        if vars(self)["_generators"] is None:
            vars(self)["_generators"] = own_generators(dataset)
        with seeded((seed ^ (index * 0x9E3779B97F4A7C15)) % 2**63, vars(self)["_generators"]):
            return own_copy(dataset[index])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_dataset" not in vars(self):
            raise AttributeError(name)
        return getattr(vars(self)["_dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_dataset"], name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_generators": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def own_copy(value: Any) -> Any:
    """A copy that shares no memory: a dataset may give all items in one buffer, and the last would fill a batch."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.clone()
        if isinstance(leaf, str | bytes | int | float | complex | bool | None):
            return leaf
        try:
            return copy.deepcopy(leaf)
        except Exception:  # an object of its own, of which nobody knows how
            return leaf

    return tree_map(copied, value)


class SeparateCollate:
    """A collate function that never shows one item to another, and gives batches of one fixed form.

    Every item is collated on its own and brought to the types of a first one, whose form is public; the rows are put
    behind each other. torch's ``default_collate`` would convert all items of a batch to the widest type among them. An
    item of another form, which says nothing about the others, becomes zeros and does not count.

    Args:
        collate_fn: the loader's; None takes torch's.
        first: an item.

    Returns:
        On call: the batch, and for every row 1.0, or 0.0 if it does not count.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any] | None, first: Any) -> None:
        usual = collate_fn is None or collate_fn is torch.utils.data.default_collate
        self._collate = torch.utils.data.default_collate if usual or collate_fn is None else collate_fn
        first = tree_map(_plain, first)
        self._alike = _raw_form(first) if usual else None
        self._rows, self._form = tree_flatten(self._collate([first]))
        if not self._rows or not all(isinstance(t, Tensor) for t in self._rows):
            raise ModelMixError("collate_fn must give tensors, or tuples or dicts of them.")
        if any(t.dim() == 0 or t.shape[0] != 1 for t in self._rows):
            raise UnprovedError(
                ALONE, "collate_fn does not give one row for one item.", "Return one row for every sample."
            )
        self._first = None if usual else first
        self._expected = None if usual else self._of_first()
        if self._expected is not None and _digest_of(self._expected) != _digest_of(self._of_first()):
            self._expected = None  # random by itself: its contents are watched
        self._rows = [torch.zeros_like(t) for t in self._rows]
        self._said = False

    def __call__(self, items: list[Any]) -> tuple[Any, Tensor]:
        items = [tree_map(_plain, item) for item in items]
        if self._alike is not None and all(_raw_form(item) == self._alike for item in items):
            return self._collate(items), torch.ones(len(items), dtype=torch.float64, device="cpu")
        memory = WatchedFunction(self._collate, "collate_fn")
        rows = [self._row(item) for item in items]
        memory.check()
        if self._expected is not None and _digest_of(self._expected) != _digest_of(self._of_first()):
            raise UnprovedError(
                ALONE,
                "collate_fn gives another row for the same item after others.",
                "Compute it from the item alone, and keep nothing between calls.",
            )
        fits = torch.tensor([row is not None for row in rows], dtype=torch.float64, device="cpu")
        found = [torch.cat(parts) for parts in zip(*(row or self._rows for row in rows), strict=True)]
        return tree_unflatten(found, self._form), fits

    def _of_first(self) -> Any:
        with seeded(0):
            return own_copy(self._collate([self._first]))

    def say_what_does_not_fit(self, fits: Tensor) -> None:
        """Warn the data holder, once, of items that do not count."""
        if self._said or bool(fits.all()):
            return
        self._said = True
        warnings.warn(
            f"{int((fits == 0).sum())} of the first {fits.numel()} items have another shape or type than item 0 of the "
            "dataset; such items count as zero and train nothing: give all of them one form, for instance by padding. "
            "(This line is for the data holder's eyes.)",
            stacklevel=2,
        )

    def _row(self, item: Any) -> list[Tensor] | None:
        """The tensors of one item; None if they have another form than those of the first."""
        try:
            leaves, form = tree_flatten(self._collate([item]))
        except (TypeError, RuntimeError):  # of no type that can be collated
            return None
        if form != self._form or not all(isinstance(t, Tensor) for t in leaves):
            return None
        if any(t.shape != own.shape or not _converts(t, own) for t, own in zip(leaves, self._rows, strict=True)):
            return None
        return [t.to(own.dtype, copy=True) for t, own in zip(leaves, self._rows, strict=True)]


def _plain(value: Any) -> Any:
    """A tensor without the methods of a subclass, which could answer for a whole batch."""
    return value.as_subclass(Tensor) if isinstance(value, Tensor) and type(value) is not Tensor else value


def _converts(t: Tensor, wanted: Tensor) -> bool:
    """Whether a type may stand for another: both floating, or both whole numbers."""
    kinds = [(x.is_floating_point(), x.is_complex(), x.dtype == torch.bool) for x in (t, wanted)]
    return kinds[0] == kinds[1]


def _raw_form(item: Any) -> Any:
    """Equal for items that torch stacks without converting any of them."""
    leaves, form = tree_flatten(item)
    return form, [(type(v), getattr(v, "dtype", None), tuple(getattr(v, "shape", ()))) for v in leaves]
