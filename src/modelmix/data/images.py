"""A folder of images for every class: train/<class>/*.png or *.jpg, and test/<class>/... if there is a test set.

The names of the folders become the names of the classes and are treated as public: they are the same whatever images
lie in them.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from modelmix._checks import whole
from modelmix.errors import ModelMixError, for_holder

ENDINGS = (".png", ".jpg", ".jpeg")
SMALLEST = 8
"""Pixels of a side."""

_VALIDATION = ("val", "valid", "validation")  # folders that other tools read; a split of ours is train or test
_NAMED = 3  # bad files that an error names
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")  # of 8 bits a colour or less


def is_present(path: Path) -> bool:
    """Return whether ``path`` has a folder train with folders in it."""
    return (path / "train").is_dir() and any(_folders(path / "train"))


def read(path: Path, size: int | None = None) -> tuple[dict[str, NDArray[np.generic]], tuple[str, ...]]:
    """Return x_train, y_train, x_test, y_test, x uint8 N x 3 x H x W, and the classes in the order of their names.

    Without a folder test, ``held_out`` says which images are kept for the test. Images are turned as their EXIF data
    say, and what is transparent becomes white. Any file that cannot be used is named; none is left out in silence.

    Args:
        size: the side in pixels to which all images are scaled, the middle of longer ones being cut out; None if they
            have one size already.
    """
    if size is not None:
        whole("image_size", size, "the side of an image", least=SMALLEST)
    if unused := [folder for folder in _folders(path) if folder.name.lower() in _VALIDATION]:
        raise ModelMixError(
            f"{unused[0]} would not be used: allowed are train and test. Rename it test, if there is none yet, or move "
            "it away."
        )
    classes = tuple(folder.name for folder in _folders(path / "train"))
    train = _list_files(path / "train", classes)
    if (path / "test").is_dir():
        test = _list_files(path / "test", classes)
    else:
        kept = [held_out(classes[label], file.name) for file, label in train]
        test = [pair for pair, out in zip(train, kept, strict=True) if out]
        train = [pair for pair, out in zip(train, kept, strict=True) if not out]
    for name, pairs in (("train", train), ("test", test)):
        if not pairs:
            raise ModelMixError(f"{path} leaves no image to {name} with: add some, or a folder test beside train.")
    x = _pixels(path, [file for file, _ in (*train, *test)], size)
    y = np.array([label for _, label in (*train, *test)], dtype=np.int64)
    n = len(train)
    return {"x_train": x[:n], "y_train": y[:n], "x_test": x[n:], "y_test": y[n:]}, classes


def held_out(folder: str, name: str) -> bool:
    """Return whether an image is held out for the test: one in ten, by a hash of class and file name alone.

    What one image does moves no other from one set to the other, which epsilon takes for granted.
    """
    digest = hashlib.sha256(f"{folder}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 10 == 0


def _folders(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _list_files(split: Path, classes: tuple[str, ...]) -> list[tuple[Path, int]]:
    """List (file, label) in the order of names."""
    if unknown := [folder.name for folder in _folders(split) if folder.name not in classes]:
        raise ModelMixError(f"{split / unknown[0]} is a class that train does not have: rename it, or add it there.")
    found: list[tuple[Path, int]] = []
    odd = [(file, "not in the folder of a class") for file in _entries(split) if not file.is_dir()]
    for label, name in enumerate(classes):
        for file in _entries(split / name):
            if file.suffix.lower() in ENDINGS and file.is_file():
                found.append((file, label))
            else:
                odd.append((file, f"not {', '.join(ENDINGS)}"))
    _refuse(split, odd, len(found) + len(odd))
    return found


def _entries(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _pixels(path: Path, files: list[Path], size: int | None) -> NDArray[np.uint8]:
    try:
        import PIL  # noqa: F401
    except ModuleNotFoundError:
        raise ModelMixError(f"{path} needs Pillow: install it with pip install 'modelmix[train]'.") from None
    out: NDArray[np.uint8] | None = None
    bad: list[tuple[Path, str]] = []
    for i, file in enumerate(files):
        try:
            image = _image(file, size)
        except Exception as error:  # a damaged file can raise anything
            bad.append((file, " ".join(str(error).split())[:80] or type(error).__name__))
            continue
        if out is None:
            out = np.empty((len(files), *image.shape), dtype=np.uint8)
        if image.shape != out.shape[1:]:
            sides = [f"{shape[2]} x {shape[1]}" for shape in (image.shape, out.shape[1:])]
            raise ModelMixError(
                f"{file} is {sides[0]} pixels and others are {sides[1]}: give one size for all "
                "(data.image_size in a recipe)."
            )
        out[i] = image
    _refuse(path, bad, len(files))
    assert out is not None  # every file is read or bad
    return out


def _image(file: Path, size: int | None) -> NDArray[np.uint8]:
    """Decode an image to 3 x H x W. Only the decoders of PNG and JPEG are used, and not for absurd sizes."""
    from PIL import Image, ImageOps

    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        with Image.open(file, formats=("PNG", "JPEG")) as opened:
            if opened.mode not in _MODES:
                raise ValueError(f"mode {opened.mode}, more than 8 bits a colour")
            image = ImageOps.exif_transpose(opened)
            if image.has_transparency_data:
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            image = image.convert("RGB")
    if min(image.size) < SMALLEST:
        raise ValueError(f"{image.width} x {image.height} pixels, fewer than {SMALLEST} a side")
    if size is not None:
        image = ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)
    pixels: NDArray[np.uint8] = np.asarray(image).transpose(2, 0, 1)
    return pixels


def _refuse(folder: Path, bad: list[tuple[Path, str]], among: int) -> None:
    if not bad:
        return
    named = ", ".join(f"{file.relative_to(folder)} ({why})" for file, why in bad[:_NAMED])
    more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
    raise for_holder(
        f"{len(bad)} of {among} files in {folder} cannot be used as images: {named}{more}. Repair them, or move "
        "them away."
    )
