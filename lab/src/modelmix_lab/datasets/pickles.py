"""The pickled batches of CIFAR-10's python version, read without running anything the file names.

A pickle is a program: it may call whatever it can import. Here the three names by which numpy writes an array stand for
inert classes of this module, every other name is refused, and the pixels come from the raw bytes alone.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelmix.errors import ModelMixError


class _Kind:
    """Where numpy.dtype stands: keeps what it is called with."""

    def __init__(self, code: object = None, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        """Byte order and the like, which a single byte has not."""


class _Array:
    """Where numpy.ndarray and its maker stand: takes the state of an array of unsigned bytes, and no other."""

    values: NDArray[np.uint8] | None = None

    def __init__(self, *_: object) -> None:
        pass

    # Both classes have this method so that a state given to the class itself, not to an instance, fails too.
    def __setstate__(self, state: Any) -> None:
        _, shape, kind, by_column, raw = state
        if not (isinstance(kind, _Kind) and kind.code == b"u1" and isinstance(raw, bytes)):
            raise pickle.UnpicklingError("an array of other things than unsigned bytes")
        self.values = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if by_column else "C")


_KNOWN = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Kind,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _KNOWN[module, name]


def batch(raw: bytes, name: str) -> tuple[NDArray[np.uint8], list[int]]:
    """The array ``data`` (read-only) and the list ``labels`` of a batch; ``name`` is what an error calls it.

    Guarantee: nothing outside this module is imported or called, whatever ``raw`` holds.
    """
    try:
        found = _Unpickler(io.BytesIO(raw), encoding="bytes").load()  # written by Python 2: its strings are bytes
        pixels, labels = found[b"data"].values, found[b"labels"]
        if not (isinstance(pixels, np.ndarray) and isinstance(labels, list) and {int} == {*map(type, labels)}):
            raise pickle.UnpicklingError("its data or labels are of another kind")
    except Exception as error:  # a damaged pickle raises almost anything
        raise ModelMixError(
            f"{name} is not a sound batch of CIFAR-10: {_told(error)}. Allowed is a pickle of one dictionary with an "
            "array of unsigned bytes, data, and a list, labels; nothing in it was run. Copy it again from a source you "
            "trust."
        ) from error
    return pixels, labels


def _told(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
