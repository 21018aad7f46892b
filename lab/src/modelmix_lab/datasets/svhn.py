"""SVHN, cropped digits (Netzer et al., 2011): train_32x32.mat and test_32x32.mat.

The test file is read only to report how good a model is, never to choose anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelmix.errors import ModelMixError
from modelmix_lab.datasets import checksum, mat

CLASSES = tuple("0123456789")

FILES = {"train": "train_32x32.mat", "test": "test_32x32.mat"}

MD5 = {"train": "e26dedcc434d2e4c54c9b2d4a06d8373", "test": "eb5a983be6a315427106f1b164d9cef3"}
"""Of the published files."""

HISTOGRAM = {
    "train": (4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659),
    "test": (1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595),
}
"""How many images of each digit, 0 to 9, the published files hold."""

_PIXELS = 32 * 32 * 3
_ZERO = 10
"""How the files write the label of the digit 0."""


def is_present(path: Path) -> bool:
    """Return whether ``path`` is a folder with one of the two files."""
    return any((path / name).is_file() for name in FILES.values())


def read(path: Path) -> tuple[dict[str, NDArray[Any]], bool]:
    """Return x_train, y_train, x_test, y_test, images N x 3 x 32 x 32, and whether both files are the published ones.

    Digits cropped anew from the full images give other bytes, so another md5 is no error. The numbers of images of each
    digit must be those of the published files in any case: another set with these file names is refused.
    """
    arrays: dict[str, NDArray[Any]] = {}
    published = True
    for split, name in FILES.items():
        file = path / name
        if not file.is_file():
            raise ModelMixError(
                f"{path} has no file {name}: SVHN is {', '.join(FILES.values())}. Add the missing file, or get both "
                "with modelmix-lab data fetch svhn."
            )
        try:
            raw = file.read_bytes()
        except OSError as error:
            raise ModelMixError(f"{file} cannot be read: {error.strerror}. Check its permissions.") from error
        published = checksum.of_bytes(raw) == MD5[split] and published
        arrays[f"x_{split}"], arrays[f"y_{split}"] = _split(raw, file, HISTOGRAM[split])
    return arrays, published


def _split(raw: bytes, file: Path, histogram: tuple[int, ...]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    count = sum(histogram)
    found = mat.arrays(raw, str(file), largest=count * _PIXELS + 4096)
    x, y = (found.get(key, np.empty(0)) for key in ("X", "y"))
    if x.dtype != np.uint8 or x.shape != (32, 32, 3, count) or y.shape != (count, 1) or y.dtype.kind not in "iuf":
        raise ModelMixError(
            f"{file} holds X, {_describe(x)}, and y, {_describe(y)}: expected are uint8 32 x 32 x 3 x {count} and "
            f"numbers {count} x 1. It is not the file of SVHN's cropped digits: get it with "
            "modelmix-lab data fetch svhn."
        )
    labels = np.where(y[:, 0] == _ZERO, 0, y[:, 0])
    counts = tuple(int((labels == digit).sum()) for digit in range(10))
    if counts != histogram or (y == 0).any():
        raise ModelMixError(
            f"{file} is not the file of SVHN's cropped digits: it holds {counts} images of the digits 0 to 9 (with 10 "
            f"for 0), expected are {histogram}. Copy it again, or get it with modelmix-lab data fetch svhn."
        )
    return np.ascontiguousarray(x.transpose(3, 2, 0, 1)), labels.astype(np.int64)


def _describe(array: NDArray[Any]) -> str:
    return f"{array.dtype} {' x '.join(map(str, array.shape))}"
