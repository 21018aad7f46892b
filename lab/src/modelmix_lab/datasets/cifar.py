"""CIFAR-10 (Krizhevsky, 2009): the files of its binary version, unpacked or still in their archive.

The python version holds the same images as pickles, which are programs; it is not read. The test batch is read only to
report how good a model is, never to choose anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelmix.errors import ModelMixError
from modelmix_lab.datasets import archive, checksum

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

FOLDER, ARCHIVE = "cifar-10-batches-bin", "cifar-10-binary.tar.gz"
"""The published archive, and the folder that it unpacks to."""

MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
"""The published md5 of every batch, in order; the last is the test batch."""

_COUNT = 10_000  # images in a batch
_LARGEST = 32_000_000  # bytes; no batch has more
_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32

Batch = tuple[NDArray[np.uint8], NDArray[np.uint8]]


def is_present(path: Path) -> bool:
    """Return whether ``path`` is the archive, or a folder that holds it, its unpacked folder or some batch."""
    return _source(path) is not None


def read(path: Path) -> dict[str, NDArray[Any]]:
    """Return x_train, y_train, x_test, y_test from a folder or an archive; images are N x 3 x 32 x 32.

    Every batch is held to its published md5 before it is decoded.
    """
    place = _source(path)
    if place is None:
        raise ModelMixError(
            f"{path} holds no CIFAR-10: expected are {', '.join(MD5)}, or their archive {ARCHIVE}. Get them with "
            "modelmix-lab data fetch cifar10."
        )
    *train, test = MD5
    # One block for a split, filled in place: the whole set is never in memory twice.
    blocks = {"train": _empty(len(train) * _COUNT), "test": _empty(_COUNT)}
    for name, raw in _batches(place):
        pixels, labels = _decode(name, raw, f"{place}: {name}" if place.is_file() else str(place / name))
        x, y = blocks["test" if name == test else "train"]
        start = 0 if name == test else train.index(name) * _COUNT
        x[start : start + _COUNT] = pixels.reshape(_COUNT, *_SHAPE)
        y[start : start + _COUNT] = labels
    (x_train, y_train), (x_test, y_test) = blocks.values()
    return {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}


def _empty(count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    return np.empty((count, *_SHAPE), np.uint8), np.empty(count, np.int64)


def _source(path: Path) -> Path | None:
    folders = (place for place in (path, path / FOLDER) if any((place / name).is_file() for name in MD5))
    archives = (place for place in (path, path / ARCHIVE) if place.name == ARCHIVE and place.is_file())
    return next(folders, None) or next(archives, None)


def _batches(place: Path) -> Iterator[tuple[str, bytes]]:
    if place.is_file():
        wanted = {f"{FOLDER}/{name}": name for name in MD5}
        for member, raw in archive.members(place, wanted, _LARGEST):
            yield wanted[member], raw
        return
    for name in MD5:
        try:
            yield name, (place / name).read_bytes()
        except FileNotFoundError:
            raise ModelMixError(
                f"{place} has no file {name}: CIFAR-10 is {', '.join(MD5)}. Add the missing file, or get all with "
                "modelmix-lab data fetch cifar10."
            ) from None
        except OSError as error:
            raise ModelMixError(f"{place / name} cannot be read: {error.strerror}. Check its permissions.") from error


def _decode(name: str, raw: bytes, source: str) -> Batch:
    """Return the pixels, N x 3072, and labels of a batch: for each image a byte with the label, then the pixels."""
    found = checksum.of_bytes(raw)
    if found != MD5[name]:
        raise ModelMixError(
            f"{source} is not the published file of CIFAR-10: its {len(raw):,} bytes have the md5 {found}, published "
            f"is {MD5[name]}. It is cut off, damaged or of another data set: copy it again."
        )
    if len(raw) != _COUNT * (1 + _PIXELS):
        raise ModelMixError(
            f"{source} holds {len(raw):,} bytes: expected are {_COUNT} images of {1 + _PIXELS} bytes. Copy it again."
        )
    rows = np.frombuffer(raw, np.uint8).reshape(_COUNT, 1 + _PIXELS)
    if rows[:, 0].max() >= len(CLASSES):
        raise ModelMixError(f"{source} holds labels up to {rows[:, 0].max()}: CIFAR-10 has 0 to 9. Copy it again.")
    return rows[:, 1:], rows[:, 0]
