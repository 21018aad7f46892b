"""Data sets as tensors, checked once when they are loaded."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from modelmix.data import fashion
from modelmix.errors import ModelMixError

DEFAULT = "fashion-mini"
"""The name of the embedded subset of Fashion-MNIST."""

CENTRE, SCALE = 0.5, 0.25
"""What `to_float` subtracts from and divides pixels in [0, 1] by."""

Array = NDArray[Any]

_KEYS = ("x_train", "y_train", "x_test", "y_test")
_MOST_CHANNELS = 4


@dataclass(frozen=True, eq=False)
class Split:
    """Samples and their labels: x is uint8 N x C x H x W (images) or float32 N x D (features), y is int64 N."""

    x: torch.Tensor
    y: torch.Tensor

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, eq=False)
class DataSet:
    """A training and a test split of samples of one shape, with labels 0 .. len(classes) - 1."""

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample: (C, H, W) or (D,)."""
        return tuple(self.train.x.shape[1:])


def load(source: str | Path = DEFAULT) -> DataSet:
    """Loads a data set.

    Args:
        source: "fashion-mini", the embedded 27,800 training and 4,000 test images of Fashion-MNIST; or a folder with
            the four idx files of Fashion-MNIST or a relative (MNIST, KMNIST); or an .npz file with x_train, y_train,
            x_test, y_test. In an .npz file x holds uint8 images (N x H x W, N x H x W x C or N x C x H x W, C at most
            4, H and W more than 4) or float features (N x D), y integers 0 .. k - 1. It is read without pickle: a
            file cannot run code.
    """
    if source == DEFAULT:
        return from_arrays(DEFAULT, fashion.embedded(), fashion.CLASSES)
    path = Path(source)
    if path.is_dir():
        arrays = fashion.folder(path)
        if fashion.is_official(arrays):
            return from_arrays("fashion-mnist", arrays, fashion.CLASSES)
        return from_arrays(path.resolve().name, arrays)
    if path.suffix == ".npz" and path.is_file():
        return from_arrays(path.stem, _npz(path))
    raise ModelMixError(
        f"data {str(source)!r} is not there: allowed are {DEFAULT}, a folder with the four idx files of Fashion-MNIST, "
        "or a file ending in .npz. Check the spelling and the path."
    )


def from_arrays(name: str, arrays: Mapping[str, Array], classes: tuple[str, ...] | None = None) -> DataSet:
    """A data set from numpy arrays x_train, y_train, x_test, y_test, shaped as in an .npz file.

    Args:
        name: what the data set and its errors are called.
        arrays: the four arrays. They are copied.
        classes: names of the labels; "0" .. "k - 1", k the number of labels in y_train, when not given.
    """
    if missing := [key for key in _KEYS if key not in arrays]:
        raise ModelMixError(f"{name} has no {missing[0]}: it must hold {', '.join(_KEYS)}. Add what is missing.")
    x_train, x_test = (_samples(f"{name}: {key}", np.asarray(arrays[key])) for key in ("x_train", "x_test"))
    if x_train.dtype != x_test.dtype or x_train.shape[1:] != x_test.shape[1:]:
        raise ModelMixError(
            f"{name}: x_train and x_test do not match: one sample is {_told(x_train[0])} in x_train and "
            f"{_told(x_test[0])} in x_test. Prepare both in the same way."
        )
    y_train = _labels(f"{name}: y_train", np.asarray(arrays["y_train"]), len(x_train))
    y_test = _labels(f"{name}: y_test", np.asarray(arrays["y_test"]), len(x_test))
    if classes is None:
        classes = _numbered(name, y_train)
    for key, y in (("y_train", y_train), ("y_test", y_test)):
        if y.max() >= len(classes):
            raise ModelMixError(
                f"{name}: {key} holds label {y.max()}: with {len(classes)} classes in training, allowed are 0 to "
                f"{len(classes) - 1}. Renumber the labels or remove these samples."
            )
    return DataSet(name, _split(x_train, y_train), _split(x_test, y_test), classes)


def to_float(x: torch.Tensor) -> torch.Tensor:
    """What a network takes: uint8 pixels become (x / 255 - 0.5) / 0.25 in float32, in [-2, 2]; floats stay as they are.

    The two constants are the same for every data set. The mean and deviation of the training images would be a
    statistic of private data: using them without noise is a release that no ledger accounts for.
    """
    if x.is_floating_point():
        return x
    if x.dtype != torch.uint8:
        raise ModelMixError(f"samples are {x.dtype}: allowed are uint8 pixels and floats. Convert them first.")
    return (x.float() / 255 - CENTRE) / SCALE


def _npz(path: Path) -> dict[str, Array]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {key: archive[key] for key in _KEYS if key in archive}
    except OSError as error:
        raise ModelMixError(f"{path} cannot be read: {error}. Check the file and its permissions.") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, TypeError, ValueError) as error:
        # RuntimeError: encrypted. TypeError: a lone array, which is no context manager. ValueError: pickled objects, or
        # no file of numpy's.
        raise ModelMixError(
            f"{path} is not a sound .npz file of plain arrays: it is cut off, damaged, of another kind or holds "
            "Python objects. Write it again with numpy.savez or numpy.savez_compressed."
        ) from error


def _samples(name: str, x: Array) -> Array:
    """Images as uint8 N x C x H x W, features as float32 N x D, contiguous and writable."""
    if x.size == 0:
        raise ModelMixError(
            f"{name} is empty, with shape {x.shape}: it needs one sample or more. Check how it was made."
        )
    if x.dtype == np.uint8 and x.ndim == 3:
        return np.array(x[:, None], order="C")
    if x.dtype == np.uint8 and x.ndim == 4:
        first, last = (x.shape[axis] <= _MOST_CHANNELS for axis in (1, 3))
        if x.shape[2] > _MOST_CHANNELS and first != last:
            return np.array(x if first else x.transpose(0, 3, 1, 2), order="C")
        raise ModelMixError(
            f"{name} has shape {x.shape}, in which the channels cannot be told: allowed are N x H x W x C and "
            f"N x C x H x W with C at most {_MOST_CHANNELS}, H and W more. Reshape it, or save float features N x D."
        )
    if x.dtype.kind == "f" and x.ndim == 2:
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite and is refused below
            features = x.astype(np.float32, order="C")
        if not np.isfinite(features).all():
            raise ModelMixError(f"{name} holds values that are not finite in float32. Remove or replace them.")
        return features
    raise ModelMixError(
        f"{name} is {x.dtype} with shape {x.shape}: allowed are uint8 images (N x H x W, N x H x W x C or "
        "N x C x H x W) and float features (N x D). Convert it to one of these."
    )


def _labels(name: str, y: Array, count: int) -> Array:
    if y.dtype.kind not in "iu" or y.ndim != 1:
        raise ModelMixError(
            f"{name} is {y.dtype} with shape {y.shape}: labels must be integers with one axis. "
            "Convert them, for instance with y.reshape(-1).astype('int64')."
        )
    if len(y) != count:
        raise ModelMixError(f"{name} has {len(y)} labels for {count} samples: each needs one. Check the pairing.")
    if y.min() < 0:
        raise ModelMixError(f"{name} holds label {y.min()}: labels must be 0 or more. Renumber them from 0.")
    return y


def _numbered(name: str, y_train: Array) -> tuple[str, ...]:
    """The classes "0" .. "k - 1". A gap is refused: it is a mistake more often than a class nobody has seen."""
    found = np.unique(y_train)
    if found[-1] != len(found) - 1:
        gap = next(label for label, value in enumerate(found) if label != value)
        raise ModelMixError(
            f"{name}: y_train never holds label {gap}, though it holds {found[-1]}: labels must be 0 to k - 1 without "
            "a gap. Renumber them."
        )
    if len(found) < 2:
        raise ModelMixError(f"{name}: y_train holds only label 0: 2 classes or more are needed. Check the labels.")
    return tuple(str(label) for label in range(len(found)))


def _split(x: Array, y: Array) -> Split:
    return Split(torch.from_numpy(x), torch.from_numpy(y.astype(np.int64)))


def _told(sample: Array) -> str:
    return f"{sample.dtype} {' x '.join(map(str, sample.shape))}"
