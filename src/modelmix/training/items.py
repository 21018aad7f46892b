"""Items of a dataset, read and collated one by one, with random draws of their own."""

from __future__ import annotations

import copy
import os
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.data import Dataset, TensorDataset

from modelmix.errors import ModelMixError, UnprovedError
from modelmix.gradients.memory import ALONE, WatchedFunction, reachable
from modelmix.training.digests import digest_of


def as_pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ModelMixError("a sample must be a pair (input, target).")
    return batch[0], batch[1]


_TRIES = 4  # of reading an item by which new generators appear
_GENERATORS = (torch.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)


def own_generators(dataset: Any) -> list[Any]:
    """Return the generators that a dataset brings: on its attributes, in closures, transforms and modules."""
    # The state of NumPy's generators is that of the bit generators within.
    each = (g.bit_generator if isinstance(g, np.random.Generator) else g for g in reachable(dataset))
    found = (g for g in each if isinstance(g, _GENERATORS) and not isinstance(g, random.SystemRandom))
    return list({id(g): g for g in found}.values())


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.BitGenerator):
        return copy.deepcopy(generator.state)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.BitGenerator):
        generator.state = type(generator)(seed).state
    else:
        generator.seed(seed if isinstance(generator, random.Random) else seed % 2**32)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.BitGenerator):
        generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


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
        vars(self)["_generators"] = None  # found at the first read in this process, and when attributes change
        vars(self)["_attributes"] = None

    def __len__(self) -> int:
        return len(vars(self)["_dataset"])

    def __getitem__(self, item: tuple[int, int] | int) -> Any:
        dataset = vars(self)["_dataset"]
        index, seed = item if isinstance(item, tuple) else (item, 0)
        if type(dataset) is TensorDataset:
            return own_copy(dataset[index])
        seed = (seed ^ (index * 0x9E3779B97F4A7C15)) % 2**63
        for _ in range(_TRIES):
            known = self._own_generators()
            with seeded(seed, known):
                found = own_copy(dataset[index])
            if self._own_generators() is known:
                return found
        raise UnprovedError(
            ALONE,
            "a dataset makes random generators anew whenever an item is read.",
            "Make them once, or draw from the generators of torch, NumPy or Python.",
        )

    def _own_generators(self) -> list[Any]:
        """Return the generators of the dataset; looked for again when one of its attributes is another object."""
        dataset = vars(self)["_dataset"]
        attributes = [id(value) for value in vars(dataset).values()] if hasattr(dataset, "__dict__") else []
        known: list[Any] | None = vars(self)["_generators"]
        if known is None or attributes != vars(self)["_attributes"]:
            found = own_generators(dataset)
            if known is None or [id(g) for g in found] != [id(g) for g in known]:
                known = found
            vars(self).update(_generators=known, _attributes=attributes)
        return known

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_dataset" not in vars(self):
            raise AttributeError(name)
        return getattr(vars(self)["_dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_dataset"], name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_generators": None, "_attributes": None}

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
        first = tree_map(plain_tensor, first)
        self._alike = _raw_form(first) if usual else None
        self._rows, self._form = tree_flatten(self._collate([first]))
        if not self._rows or not all(isinstance(t, Tensor) for t in self._rows):
            raise ModelMixError("collate_fn must give tensors, or tuples or dicts of them.")
        if any(t.dim() == 0 or t.shape[0] != 1 for t in self._rows):
            raise UnprovedError(
                ALONE, "collate_fn does not give one row for one item.", "Return one row for every sample."
            )
        self._first = None if usual else first
        self._generators = [] if usual else own_generators(self._collate)
        self._expected = None if usual else self._of_first()
        if self._expected is not None and digest_of(self._expected) != digest_of(self._of_first()):
            self._expected = None  # random by itself: its contents are watched
        self._rows = [torch.zeros_like(t) for t in self._rows]
        self._said = False

    def __call__(self, items: list[Any]) -> tuple[Any, Tensor]:
        items = [tree_map(plain_tensor, item) for item in items]
        if self._alike is not None and all(_raw_form(item) == self._alike for item in items):
            return self._collate(items), torch.ones(len(items), dtype=torch.float64, device="cpu")
        memory = WatchedFunction(self._collate, "collate_fn")
        rows = [self._row(item) for item in items]
        memory.check()
        if self._expected is not None and digest_of(self._expected) != digest_of(self._of_first()):
            raise UnprovedError(
                ALONE,
                "collate_fn gives another row for the same item after others.",
                "Compute it from the item alone, and keep nothing between calls.",
            )
        fits = torch.tensor([row is not None for row in rows], dtype=torch.float64, device="cpu")
        found = [torch.cat(parts) for parts in zip(*(row or self._rows for row in rows), strict=True)]
        return tree_unflatten(found, self._form), fits

    def _of_first(self) -> Any:
        with seeded(0, self._generators):
            return own_copy(self._collate([self._first]))

    def warn_of_misfits(self, fits: Tensor) -> None:
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

    def _collated(self, item: Any) -> Any:
        """Collate one item, with draws that nobody knows: those of the loop's generators are a public stream."""
        if self._first is None:  # torch's own function, which draws nothing
            return self._collate([item])
        with seeded(int.from_bytes(os.urandom(7), "little"), self._generators):
            return self._collate([item])

    def _row(self, item: Any) -> list[Tensor] | None:
        """The tensors of one item; None if they have another form than those of the first."""
        try:
            leaves, form = tree_flatten(self._collated(item))
        except (TypeError, RuntimeError):  # of no type that can be collated
            return None
        if form != self._form or not all(isinstance(t, Tensor) for t in leaves):
            return None
        if any(t.shape != own.shape or not _converts(t, own) for t, own in zip(leaves, self._rows, strict=True)):
            return None
        return [t.to(own.dtype, copy=True) for t, own in zip(leaves, self._rows, strict=True)]


def plain_tensor(value: Any) -> Any:
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
