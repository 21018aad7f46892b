"""CIFAR-10 (Krizhevsky, 2009): the files of its binary and its python version, unpacked or still in their archive.

The test batch is read only to report how good a model is, never to choose anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelmix.errors import ModelMixError
from modelmix_lab.datasets import archive, checksum, pickles

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32

Batch = tuple[NDArray[np.uint8], NDArray[Any]]


@dataclass(frozen=True)
class Edition:
    """One way in which CIFAR-10 is published.

    Args:
        folder: what the archive unpacks to.
        archive: the name of the archive.
        md5: the published md5 of each batch, by file name, in order; the last is the test batch.
        decode: pixels N x 3072 and labels of a batch, from its bytes and the name to call it in an error.
        count: images in a batch.
        size: no batch has more bytes than this.
    """

    folder: str
    archive: str
    md5: Mapping[str, str]
    decode: Callable[[bytes, str], Batch]
    count: int = 10_000
    size: int = 32_000_000


def _binary(raw: bytes, name: str) -> Batch:
    """A byte with the label, then 3072 with the pixels, for each image."""
    if len(raw) % (1 + _PIXELS):
        raise ModelMixError(
            f"{name} holds {len(raw):,} bytes: allowed are {1 + _PIXELS} for each image. Copy it again."
        )
    rows = np.frombuffer(raw, np.uint8).reshape(-1, 1 + _PIXELS)
    return rows[:, 1:], rows[:, 0]


def _python(raw: bytes, name: str) -> Batch:
    pixels, labels = pickles.batch(raw, name)
    return pixels, np.array(labels)


BINARY = Edition(
    "cifar-10-batches-bin",
    "cifar-10-binary.tar.gz",
    {
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    },
    _binary,
)
PYTHON = Edition(
    "cifar-10-batches-py",
    "cifar-10-python.tar.gz",
    {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
    _python,
)
EDITIONS = (BINARY, PYTHON)


def there(path: Path) -> bool:
    """Whether ``path`` is an archive of CIFAR-10, or a folder that holds one, its unpacked folder or some batch."""
    return _source(path) is not None


def read(path: Path) -> dict[str, NDArray[Any]]:
    """x_train, y_train, x_test, y_test from a folder or an archive; images are N x 3 x 32 x 32.

    Every batch is held to its published md5 before it is decoded.
    """
    source = _source(path)
    if source is None:
        raise ModelMixError(
            f"{path} holds no CIFAR-10: expected are {', '.join(BINARY.md5)}, their archive, or the python version. "
            "Get them with modelmix-lab data fetch cifar10."
        )
    edition, place = source
    count, *train, test = edition.count, *edition.md5
    # One block for a split, filled in place: the whole set is never in memory twice.
    blocks = {"train": _empty(len(train) * count), "test": _empty(count)}
    for name, raw in _batches(edition, place):
        pixels, labels = _checked(edition, name, raw, f"{place}: {name}" if place.is_file() else str(place / name))
        x, y = blocks["test" if name == test else "train"]
        start = 0 if name == test else train.index(name) * count
        x[start : start + count] = pixels.reshape(count, *_SHAPE)
        y[start : start + count] = labels
    (x_train, y_train), (x_test, y_test) = blocks.values()
    return {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}


def _empty(count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    return np.empty((count, *_SHAPE), np.uint8), np.empty(count, np.int64)


def _source(path: Path) -> tuple[Edition, Path] | None:
    for edition in EDITIONS:
        for place in (path, path / edition.folder):
            if any((place / name).is_file() for name in edition.md5):
                return edition, place
    for edition in EDITIONS:
        for place in (path, path / edition.archive):
            if place.name == edition.archive and place.is_file():
                return edition, place
    return None


def _batches(edition: Edition, place: Path) -> Iterator[tuple[str, bytes]]:
    if place.is_file():
        wanted = {f"{edition.folder}/{name}": name for name in edition.md5}
        for member, raw in archive.members(place, wanted, edition.size):
            yield wanted[member], raw
        return
    for name in edition.md5:
        try:
            yield name, (place / name).read_bytes()
        except FileNotFoundError:
            raise ModelMixError(
                f"{place} has no file {name}: CIFAR-10 is {', '.join(edition.md5)}. Add the missing file, or get all "
                "with modelmix-lab data fetch cifar10."
            ) from None
        except OSError as error:
            raise ModelMixError(f"{place / name} cannot be read: {error.strerror}. Check its permissions.") from error


def _checked(edition: Edition, name: str, raw: bytes, told: str) -> Batch:
    found = checksum.of_bytes(raw)
    if found != edition.md5[name]:
        raise ModelMixError(
            f"{told} is not the published file of CIFAR-10: its {len(raw):,} bytes have the md5 {found}, published is "
            f"{edition.md5[name]}. It is cut off, damaged or of another data set: copy it again."
        )
    pixels, labels = edition.decode(raw, told)
    if pixels.shape != (edition.count, _PIXELS) or labels.shape != (edition.count,):
        raise ModelMixError(
            f"{told} holds images of shape {pixels.shape} and labels of shape {labels.shape}: expected are "
            f"{(edition.count, _PIXELS)} and {(edition.count,)}. Copy it again."
        )
    if labels.min() < 0 or labels.max() >= len(CLASSES):
        raise ModelMixError(
            f"{told} holds labels from {labels.min()} to {labels.max()}: CIFAR-10 has 0 to 9. Copy it again."
        )
    return pixels, labels
