"""Fashion-MNIST (Zalando Research, 2017, MIT licence): the embedded subset, and a folder of the four idx files.

The embedded subset holds original 28 x 28 pixels, unchanged: of the official training set the first 2,780 images of
each class, of the official test set the first 400 of each, in the order of the files. ``tools/embed_fashion_mnist.py``
builds it.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from modelmix.data import idx
from modelmix.errors import ModelMixError

CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)

CANONICAL = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}
"""The files of a folder, by what they hold. MNIST and its other relatives use the same names."""

EMBEDDED = {
    "x_train": ("train-images-by-column.idx.xz", "f230fb3ea80ab1a48d091f3843e2f7d7f053272fced9f5c459da0cce4f1a5a6e"),
    "y_train": ("train-labels.idx.xz", "0ac21ac1627de9bff69b7e97d498b44d9e19672fa9f100f18fa0436630bb4c0b"),
    "x_test": ("test-images-by-column.idx.xz", "e8a9e53b5eaf514cc3de641a48b77b4cec1ea386d00b8059163acd28919b33bd"),
    "y_test": ("test-labels.idx.xz", "971e420db6b6f71f4174cbc8a2621f51114c83542805ce879c9e733454af4717"),
}
"""The embedded files and their SHA-256. Images lie transposed: columns of clothes pack about 4 % better than rows."""

OFFICIAL = {
    "x_train": "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
    "y_train": "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
    "x_test": "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
    "y_test": "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
}
"""SHA-256 of the values of the official files, without header and packing: any packing will do."""

_PACKINGS = ("", ".gz", ".xz")


def embedded() -> dict[str, NDArray[np.uint8]]:
    """Return x_train, y_train, x_test, y_test of the embedded subset, N x 28 x 28. Verified by SHA-256."""
    arrays = {key: idx.decode(_embedded_bytes(name, digest), name) for key, (name, digest) in EMBEDDED.items()}
    return {key: array.transpose(0, 2, 1) if array.ndim == 3 else array for key, array in arrays.items()}


def folder(path: Path) -> dict[str, NDArray[np.uint8]]:
    """Read the same four arrays from a folder with the canonical names, plain or ending in .gz or .xz."""
    return {key: idx.read(_find(path, name)) for key, name in CANONICAL.items()}


def is_present(path: Path) -> bool:
    """Return whether ``path`` is a folder with one of the four files."""
    return any((path / (name + packing)).is_file() for name in CANONICAL.values() for packing in _PACKINGS)


def is_official(arrays: dict[str, NDArray[np.uint8]]) -> bool:
    """Return whether these are the four arrays of the official Fashion-MNIST, not of a relative with the same names."""
    return all(hashlib.sha256(arrays[key].tobytes()).hexdigest() == digest for key, digest in OFFICIAL.items())


def _embedded_bytes(name: str, digest: str) -> bytes:
    try:
        packed = (files("modelmix.data") / "embedded" / name).read_bytes()
    except OSError as error:
        raise ModelMixError(
            f"the embedded file {name} cannot be read: {error.strerror}. Reinstall modelmix."
        ) from error
    if hashlib.sha256(packed).hexdigest() != digest:
        raise ModelMixError(f"the embedded file {name} is damaged: its SHA-256 is not {digest}. Reinstall modelmix.")
    return packed


def _find(path: Path, name: str) -> Path:
    for packing in _PACKINGS:
        if (path / (name + packing)).is_file():
            return path / (name + packing)
    raise ModelMixError(
        f"{path} has no file {name}: a folder must hold {', '.join(CANONICAL.values())}, "
        "each plain or ending in .gz or .xz. Add the missing file."
    )
