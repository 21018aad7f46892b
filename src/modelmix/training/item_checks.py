"""What a dataset must not do: items that look at other items, or remember which ones were read."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from modelmix.errors import UnprovedError
from modelmix.gradients.device import preserve_torch_rng
from modelmix.gradients.memory import ALONE
from modelmix.training.digests import digest_of
from modelmix.training.items import Items

PROBED = 16


_COPIED = 64 * 2**20  # bytes of a dataset that is copied to be tried out
_SEEDS = 4  # a coin of one half falls both ways
_TRIED = 8  # items that are compared
_REPEATED = 20  # times that a change is seen before it is believed: an item may be random in a way of its own


def check_items_independent(dataset: Dataset[Any]) -> None:
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
    twin = copy_for_probing(dataset)
    if twin is dataset:
        return

    def read(items: Iterable[int]) -> dict[int, bytes]:
        with _same_draws() as begin:
            return {i: digest_of((begin(), twin[i])[1]) for i in items}

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
        fresh = copy_for_probing(dataset)
        return [] if fresh is dataset else [_read(fresh, i, 0) for i in spread]

    # Copies may share what they draw from, or what they remember: nobody can tell that from entropy of the system.
    if several() != several():
        raise UnprovedError(
            ALONE,
            "an item of the dataset is another one when it is read again, with the same random draws.",
            "Keep nothing between reads, also not in globals or classes, and draw from generators of torch, NumPy or "
            "Python.",
        )
    for seed in range(_SEEDS):
        used = copy_for_probing(dataset)
        for target in {0, n - 1 - n // 3}:
            fresh = used if used is dataset else copy_for_probing(dataset)
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


def copy_for_probing(dataset: Any) -> Any:
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
    return digest_of(Items(dataset)[i, seed])


def _another(row: Tensor, rows: Tensor) -> Tensor:
    """Return a row that differs from a given one: of whole numbers one that is there, for they may stand for others."""
    if row.is_floating_point() or row.is_complex():
        return torch.where(torch.isfinite(row) & (row != -3), 2 * row + 3, 1.0)
    different = (rows != row).reshape(len(rows), -1).any(1).nonzero()
    if len(different):
        return rows[different[0, 0]].clone()
    return ~row if row.dtype == torch.bool else row + 1


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
        inside = list(holder[:PROBED])
    else:
        inside = list(vars(holder).values()) if hasattr(holder, "__dict__") and not callable(holder) else []
    return [t for value in inside for t in arrays_of(value, n, depth - 1, met)]
