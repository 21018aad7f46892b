"""Images that nobody has to protect, for what privacy does not pay for: directions of gradients, for instance."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from modelmix.data.dataset import as_samples
from modelmix.data.directory import directory
from modelmix.errors import ModelMixError


def public_images(source: str | Path, shape: tuple[int, ...], data_dir: str | Path | None = None) -> Tensor:
    """Read the array x of an .npz file, laid out as the samples of a data set are. Labels are not read.

    That they are public is for the caller to know: epsilon says nothing about them.

    Args:
        source: the file, as a path or as a name in the data directory.
        shape: of a sample that the network takes.
        data_dir: see ``load``.
    """
    places = (Path(source), directory(data_dir) / source)
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise ModelMixError(
            f"there are no public images {str(source)!r}: give an .npz file with an array x of uint8 images, by its "
            f"path or in the data directory {directory(data_dir)}."
        )
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            x = archive["x"]
    except (OSError, KeyError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, TypeError, ValueError):
        raise ModelMixError(
            f"{path} is not an .npz file with an array x of images: write it with numpy.savez."
        ) from None
    images = torch.from_numpy(as_samples(f"{path}: x", x, True))
    if tuple(images.shape[1:]) != shape:
        raise ModelMixError(
            f"the images of {path} are {tuple(images.shape[1:])} and the private ones {shape}: scale them to that."
        )
    return images
