"""Data sets as tensors, checked once when they are loaded."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from modelmix import kinds
from modelmix._checks import whole
from modelmix.data import fashion, images
from modelmix.data.directory import VARIABLE, directory
from modelmix.errors import ModelMixError, for_holder

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


def load(
    source: str | Path = DEFAULT,
    data_dir: str | Path | None = None,
    image_size: int | None = None,
    *,
    classes: int | None = None,
    test_public: bool = False,
) -> DataSet:
    """Load a data set and check it.

    The test split of every set is there to report how good a model is, never to choose a model or a setting.

    Args:
        source: one of

            - "fashion-mini", the embedded 27,800 training and 4,000 test images of Fashion-MNIST;
            - a name of ``modelmix.kinds.DATA``: its files, in the data directory. modelmix-lab has "cifar10", "svhn"
              and "fashion-mnist";
            - a folder with these files of one set, in it or below it as in the data directory, or with the four idx
              files of Fashion-MNIST or a relative (MNIST, KMNIST);
            - a folder with train/<class>/*.png or *.jpg, and test/<class>/... or one image in ten of train, see
              ``modelmix.data.images``;
            - an archive of such a set, packed as published;
            - an .npz file with x_train, y_train, x_test, y_test: x holds uint8 images (N x H x W, N x H x W x C or
              N x C x H x W, C at most 4, H and W more than 4) or float features (N x D), y integers 0 .. k - 1.

            No file can run code: no .npz file is trusted.
        data_dir: where public sets are looked for by name; by default the folder that the environment variable
            MODELMIX_DATA names, else ~/.cache/modelmix.
        image_size: the side in pixels to which the images of a folder are scaled; nothing else takes it.
        classes: how many classes an .npz or idx file has. Private labels are never counted: a class that only one
            sample has would show in the shape of the model.
        test_public: whether the test split is public; its largest label then tells the classes where nothing else does.
    """
    if classes is not None:
        classes = whole("classes", classes, "the number of classes", least=2)
    if image_size is not None and (source in (DEFAULT, *kinds.DATA) or Path(source).is_file()):
        raise ModelMixError("image_size is for a folder of images, train/<class>/*.png: leave it out.")
    if source == DEFAULT:
        return _assemble(DEFAULT, fashion.embedded(), fashion.CLASSES, owned=True)
    if isinstance(source, str) and source in kinds.DATA:
        return _load_named(source, data_dir)
    path = Path(source)
    counted: dict[str, Any] = {"count": classes, "test_public": test_public}
    found = {name: place for name, kind in _recognised().items() if (place := kind.held(path)) is not None}
    several = [*found, *(["images in train/<class>/"] if images.is_present(path) else [])]
    if len(several) > 1:
        raise ModelMixError(
            f"{path} holds files of {' and of '.join(several)}: which is meant cannot be told. Give the name of one, "
            "with this folder as data directory, or a folder that holds one alone."
        )
    if found:
        return _load_public(*next(iter(found.items())), **counted)
    if path.suffix == ".npz" and path.is_file():
        return _assemble(path.stem, _npz(path), owned=True, **counted)
    if images.is_present(path):
        arrays, names = images.read(path, image_size)
        return _assemble(path.resolve().name, arrays, names, owned=True)
    if path.is_dir():
        raise ModelMixError(
            f"{path} has no file {' or '.join(_markers())}: a folder must hold the "
            f"files of {', of '.join(kind.title for kind in _recognised().values())}, or images in train/<class>/. "
            "Check the path."
        )
    trouble = "is there but is no known data set" if path.exists() else "is not there"
    raise ModelMixError(
        f"data {str(source)!r} {trouble}: allowed are {DEFAULT}, a folder with the four idx files of Fashion-MNIST "
        f"or with images in train/<class>/, a file ending in .npz{_more_sources()}. Check the spelling and the path."
    )


def from_arrays(
    name: str, arrays: Mapping[str, Array], classes: tuple[str, ...] | int | None = None, *, test_public: bool = False
) -> DataSet:
    """Make a data set from numpy arrays x_train, y_train, x_test, y_test, shaped as in an .npz file.

    Args:
        name: what the data set and its errors are called.
        arrays: the four arrays. They are copied.
        classes: names of the labels, or how many there are. They may be left out if the test split is public.
        test_public: see ``load``.
    """
    if isinstance(classes, tuple):
        return _assemble(name, arrays, classes, owned=False)
    return _assemble(name, arrays, owned=False, count=classes, test_public=test_public)


def _idx_below(path: Path) -> Path | None:
    places = (path / place for place in ("", "fashion-mnist", "FashionMNIST/raw"))
    return next((place for place in places if fashion.is_present(place)), None)


def read_idx(path: Path) -> tuple[str, Mapping[str, Array], tuple[str, ...] | None]:
    """Read Fashion-MNIST from a folder of idx files, or a relative of it, which is called by its folder."""
    found = fashion.folder(path)
    if fashion.is_official(found):
        return "fashion-mnist", found, fashion.CLASSES
    return path.resolve().name, found, None


_IDX = kinds.NamedData(
    title="Fashion-MNIST or a relative (idx)",
    marker=fashion.CANONICAL["x_train"],
    find=_idx_below,
    held=_idx_below,
    read=read_idx,
    classes=fashion.CLASSES,
    fetch="",
)


def _recognised() -> dict[str, kinds.NamedData]:
    """Return the sets whose files are recognised in a folder."""
    return kinds.DATA if "fashion-mnist" in kinds.DATA else {**kinds.DATA, "fashion-mnist": _IDX}


def _markers() -> list[str]:
    """List a file of each set that a folder may hold."""
    return list(dict.fromkeys([_IDX.marker, *(kind.marker for kind in kinds.DATA.values())]))


def _more_sources() -> str:
    archives = [archive for kind in kinds.DATA.values() for archive in kind.archives]
    if not kinds.DATA:
        return " (benchmark sets by name come with modelmix-lab)"
    return f", {' or '.join(archives)}, or one of the names {', '.join(kinds.DATA)}"


def _load_named(name: str, data_dir: str | Path | None) -> DataSet:
    kind, root = kinds.DATA[name], directory(data_dir)
    place = kind.find(root)
    if place is None:
        raise ModelMixError(
            f"{name} is not in the data directory {root}: get it with {kind.fetch} --data-dir "
            f"{quote(str(root))}, or give the directory that holds it (--data-dir, or the environment variable "
            f"{VARIABLE})."
        )
    found = _load_public(name, place, count=len(kind.classes))
    if found.classes != kind.classes:
        raise ModelMixError(
            f"{place} does not hold {name}: its files have the right names and other values, as those of a relative "
            f"have. Get it with {kind.fetch}, or load this folder by its path."
        )
    return found


def _load_public(name: str, path: Path, **counted: Any) -> DataSet:
    """Load the set of which ``path`` holds files."""
    called, arrays, classes = _recognised()[name].read(path)
    return _assemble(called, arrays, classes, owned=True, **({} if classes else counted))


def _assemble(
    name: str,
    arrays: Mapping[str, Array],
    classes: tuple[str, ...] | None = None,
    *,
    owned: bool,
    count: int | None = None,
    test_public: bool = False,
) -> DataSet:
    """Check the arrays and make tensors of them, which share the memory of ``owned`` ones where the layout fits."""
    if missing := [key for key in _KEYS if key not in arrays]:
        raise ModelMixError(f"{name} has no {missing[0]}: it must hold {', '.join(_KEYS)}. Add what is missing.")
    x_train, x_test = (as_samples(f"{name}: {key}", np.asarray(arrays[key]), owned) for key in ("x_train", "x_test"))
    if x_train.dtype != x_test.dtype or x_train.shape[1:] != x_test.shape[1:]:
        raise ModelMixError(
            f"{name}: x_train and x_test do not match: one sample is {_describe(x_train[0])} in x_train and "
            f"{_describe(x_test[0])} in x_test. Prepare both in the same way."
        )
    y_train = _labels(f"{name}: y_train", np.asarray(arrays["y_train"]), len(x_train))
    y_test = _labels(f"{name}: y_test", np.asarray(arrays["y_test"]), len(x_test))
    if classes is None:
        classes = _number_classes(name, count, y_test if test_public else None)
    for key, y in (("y_train", y_train), ("y_test", y_test)):
        if y.max() >= len(classes):
            raise for_holder(
                f"{name}: {key} holds label {y.max()}: with {len(classes)} classes, allowed are 0 to "
                f"{len(classes) - 1}. Renumber the labels, or give the right number of classes."
            )
    return DataSet(name, _split(x_train, y_train), _split(x_test, y_test), classes)


def to_float(x: torch.Tensor) -> torch.Tensor:
    """Convert uint8 pixels to (x / 255 - 0.5) / 0.25 in float32, in [-2, 2]; floats stay as they are.

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


def as_samples(name: str, x: Array, owned: bool) -> Array:
    """Return images as uint8 N x C x H x W, features as float32 N x D, contiguous and writable."""
    laid_out = np.ascontiguousarray if owned else partial(np.array, order="C")
    if x.size == 0:
        raise ModelMixError(
            f"{name} is empty, with shape {x.shape}: it needs one sample or more. Check how it was made."
        )
    if x.dtype == np.uint8 and x.ndim == 3:
        return laid_out(x[:, None])
    if x.dtype == np.uint8 and x.ndim == 4:
        first, last = (x.shape[axis] <= _MOST_CHANNELS for axis in (1, 3))
        if x.shape[2] > _MOST_CHANNELS and first != last:
            return laid_out(x if first else x.transpose(0, 3, 1, 2))
        raise ModelMixError(
            f"{name} has shape {x.shape}, in which the channels cannot be told: allowed are N x H x W x C and "
            f"N x C x H x W with C at most {_MOST_CHANNELS}, H and W more. Reshape it, or save float features N x D."
        )
    if x.dtype.kind == "f" and x.ndim == 2:
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite and is refused below
            features = x.astype(np.float32, order="C", copy=not owned)
        if not np.isfinite(features).all():
            raise for_holder(f"{name} holds values that are not finite in float32. Remove or replace them.")
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
        raise for_holder(f"{name} has {len(y)} labels for {count} samples: each needs one. Check the pairing.")
    if y.min() < 0:
        raise for_holder(f"{name} holds label {y.min()}: labels must be 0 or more. Renumber them from 0.")
    return y


def _number_classes(name: str, count: int | None, public: Array | None) -> tuple[str, ...]:
    """Name the classes "0" .. "k - 1": as many as were declared, or as public labels show."""
    if count is None and public is not None:
        count = int(public.max()) + 1
    if count is None:
        raise ModelMixError(
            f"{name} does not say how many classes there are, and private labels are not counted: give classes "
            "(data.classes in a recipe, --set data.classes=N), or declare the test set public "
            "(--set data.test_public=true)."
        )
    return tuple(str(label) for label in range(whole("classes", count, "the number of classes", least=2)))


def _split(x: Array, y: Array) -> Split:
    return Split(torch.from_numpy(x), torch.from_numpy(y.astype(np.int64)))


def _describe(sample: Array) -> str:
    return f"{sample.dtype} {' x '.join(map(str, sample.shape))}"
