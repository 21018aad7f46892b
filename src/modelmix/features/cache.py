"""Features computed once and cached on disk, as a .npy file that is mapped into memory and never loaded whole.

Behind the array, where readers of .npy files do not look, comes a digest of it: a file that changed is not used.

A file appears under its name when it is complete. If its process is stopped, the next one continues; a second process
that wants the same features meanwhile waits for the first.

A file is named after all that its content depends on: a hash of the images, the transform's name, parameters and
version, and the number format. Features of private images are as private as the images: only their owner may read the
file, and whoever deletes the images must delete the cache as well.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import math
import os
import shutil
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from modelmix._files import hold_lock
from modelmix.errors import ModelMixError
from modelmix.features.resumable_file import DIGEST_BYTES, ResumableFile, digest_of, sweep

VARIABLE = "MODELMIX_CACHE"
"""The environment variable that names the folder of caches."""

FORMATS = ("float16", "float32")

_LOG = logging.getLogger("modelmix")
_SILENCE = 15.0  # seconds
_NAMES = "*-v*.npy"
_AT_ONCE = 1000  # images


class Transform(Protocol):
    """What can be cached: a function of every image alone that changes only with its version.

    A transform with an attribute ``lasting = False`` is never continued by another process: its features of the
    remaining images would not fit those that were computed.
    """

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> int: ...

    @property
    def parameters(self) -> dict[str, object]: ...

    def shape(self, images: Tensor) -> tuple[int, ...]: ...

    def batches(self, images: Tensor) -> Iterator[Tensor]: ...


def cached(
    transform: Transform,
    images: Tensor,
    *,
    folder: str | Path | None = None,
    dtype: Literal["float16", "float32"] = "float32",
) -> Tensor:
    """Return the features of ``images``, from the cache or computed and cached.

    The tensor is mapped from the file, copy on write: changing it never changes the file.

    Args:
        transform: for instance an ``Extractor``.
        images: uint8 images, in the order in which the features are wanted.
        folder: where caches are; else the environment's MODELMIX_CACHE, else ~/.cache/modelmix/features.
        dtype: how features are stored. float16 takes half the disk and rounds them by 5e-4 of themselves or less.

    Raises:
        ModelMixError: the cache cannot be written, or the transform gives other shapes than it declares.
    """
    if dtype not in FORMATS:
        raise ModelMixError(f"dtype = {dtype!r} is not allowed: features are stored as {' or '.join(FORMATS)}.")
    shape = transform.shape(images)
    folder = Path(folder or os.environ.get(VARIABLE) or "~/.cache/modelmix/features").expanduser()
    stem = f"{transform.name}-{_key(transform, images, dtype)}"
    path = folder / f"{stem}-v{transform.version}.npy"
    if os.path.exists(path):  # also False where the folder may not be looked into
        try:
            return _open(path, shape, dtype)
        except (OSError, ValueError) as error:
            warnings.warn(f"{path} is not a sound cache ({error}): it is computed anew.", stacklevel=2)
    elif others := sorted(folder.glob(f"{stem}-v*.npy")):
        warnings.warn(
            f"{others[-1]} is of another version of {transform.name}: features are computed anew; delete it at will.",
            stacklevel=2,
        )
    try:
        with hold_lock(path, lambda: _LOG.info("%s: another process computes these features; waiting", transform.name)):
            with suppress(OSError, ValueError):
                return _open(path, shape, dtype)  # another process has just made it
            _write(path, shape, dtype, transform, images)
            return _open(path, shape, dtype)
    except OSError as error:
        raise ModelMixError(
            f"cannot write the cache {path}, {_size(shape, dtype) / 1e9:.2g} GB: {error.strerror or error}. Make room, "
            f"or name another folder with {VARIABLE}."
        ) from None


@dataclass(frozen=True, eq=False)
class Cached:
    """A slow transform whose features are cached, under its own name, before others are computed from them."""

    transform: Transform

    lasting: ClassVar[bool] = False  # caches are of all images, not of those that another process left over

    @property
    def name(self) -> str:
        return self.transform.name

    @property
    def version(self) -> int:
        return self.transform.version

    @property
    def parameters(self) -> dict[str, object]:
        return self.transform.parameters

    def shape(self, images: Tensor) -> tuple[int, ...]:
        return self.transform.shape(images)

    def batches(self, images: Tensor) -> Iterator[Tensor]:
        yield from torch.split(cached(self.transform, images), _AT_ONCE)


def log_progress(name: str, count: int, batches: Iterable[Tensor], done: int = 0) -> Iterator[Tensor]:
    """Yield the batches unchanged and log progress every 15 s to the logger ``modelmix``.

    Args:
        count, done: images in all, and how many of them were done before.
    """
    began = last = time.monotonic()
    first = 0
    if done:
        _LOG.info("%s: features of %s of %s images are there", name, f"{done:,}", f"{count:,}")
    for batch in batches:
        yield batch
        done, now = done + len(batch), time.monotonic()
        if first == 0:  # what comes before the first batch does not come again
            began, first = now, done
        elif now - last > _SILENCE and done < count:
            last = now
            left = (now - began) * (count - done) / (done - first)
            _LOG.info("%s: features of %s of %s images, %.0f s left", name, f"{done:,}", f"{count:,}", left)


def _key(transform: Transform, images: Tensor, dtype: str) -> str:
    """Hash the images and all parameters; the version is in the file's name, where it can be seen."""
    content = images.detach().cpu().contiguous().numpy()
    about = [transform.name, transform.parameters, dtype, str(content.dtype), content.shape]
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    digest.update(content.data)
    return digest.hexdigest()[:32]


def _header(shape: tuple[int, ...], dtype: str) -> bytes:
    """Return the beginning of a .npy file of this shape and format."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": tuple(shape)}
    )
    return file.getvalue()


def _size(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def _open(path: Path, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Map a cache; ValueError if it is anything but a whole, unchanged file of this shape and format.

    The header is compared and not parsed: a damaged one cannot ask for anything.
    """
    header, size = _header(shape, dtype), _size(shape, dtype)
    with path.open("rb") as file:
        if file.read(len(header)) != header:
            raise ValueError("its header is damaged or of another array")
        if path.stat().st_size != len(header) + size + DIGEST_BYTES:
            raise ValueError("its size is wrong")
        digest = digest_of(file, size)  # plain reads: a bad disk under a mapped file ends the process
        if digest is None or file.read() != digest.digest():
            raise ValueError("its content is damaged")
    return torch.from_numpy(np.memmap(path, dtype, "c", offset=len(header), shape=shape))


def _write(path: Path, shape: tuple[int, ...], dtype: str, transform: Transform, images: Tensor) -> None:
    """Write a .npy file, continuing what another process left of it, and rename it when it is complete.

    After an interrupt or on a full disk the next call continues where this one stopped. Plain writes, not a mapped
    file: a disk that fills up under a mapped file ends the process instead of raising an error.
    """
    sweep(path.parent, _NAMES)
    header, row = _header(shape, dtype), _size(shape[1:], dtype)
    file = ResumableFile(path, header, row, resume=getattr(transform, "lasting", True))
    try:
        _require_room(path.parent, _size(shape, dtype) - file.rows * row)
        if file.rows < len(images):
            batches = transform.batches(images[file.rows :])
            for batch in log_progress(transform.name, len(images), batches, file.rows):
                _require(transform, (len(images), *batch.shape[1:]), shape)
                file.append(len(batch), batch.cpu().numpy().astype(dtype, order="C").data)
        _require(transform, (file.rows, *shape[1:]), shape)
        file.finish()
    except ModelMixError:  # the features are no good
        file.discard()
        raise
    except BaseException:
        file.suspend()
        raise


def _require(transform: Transform, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Refuse features of another shape than declared: their file could never be read."""
    if tuple(found) != tuple(shape):
        raise ModelMixError(
            f"{transform.name} gave features of shape {tuple(found)} and declared {tuple(shape)}: its shape and its "
            "batches must agree."
        )


def _require_room(folder: Path, size: int) -> None:
    """Refuse a disk that is too small before hours of work, not after."""
    if shutil.disk_usage(folder).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
