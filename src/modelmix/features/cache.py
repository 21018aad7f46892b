"""Features computed once and kept on disk, as a .npy file that is mapped into memory and never loaded whole.

Behind the array, where readers of .npy files do not look, comes a digest of it: a file that changed is not used.

A file is named after all that its content depends on: a hash of the images, the transform's name, parameters and
version, and the number format. Features of private images are as private as the images: only their owner may read the
file, and whoever deletes the images must delete the cache as well.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import os
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from modelmix.errors import ModelMixError
from modelmix.files import lock

VARIABLE = "MODELMIX_CACHE"
"""The environment variable that names the folder of caches."""

FORMATS = ("float16", "float32")

_LOG = logging.getLogger("modelmix")
_SILENCE = 15.0  # seconds
_BLOCK = 1 << 20  # bytes that are read at a time
_TEMPORARY = ".*-v*.npy.*.tmp"  # the names under which caches are written before they get their own


class Transform(Protocol):
    """What can be cached: a function of every image alone, that never changes while its version stays."""

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
    """The features of ``images``, from the cache if they are there, else computed and kept.

    The tensor is mapped from the file, copy on write: changing it never changes the file.

    Args:
        transform: for instance ``Scattering()``.
        images: uint8 images, in the order in which the features are wanted.
        folder: where caches are; else the environment's MODELMIX_CACHE, else ~/.cache/modelmix/features.
        dtype: how features are kept. float16 takes half the disk and rounds them by 5e-4 of themselves or less.
    """
    if dtype not in FORMATS:
        raise ModelMixError(f"dtype = {dtype!r} is not allowed: features are kept as {' or '.join(FORMATS)}.")
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
    _write(path, shape, dtype, told(transform.name, len(images), transform.batches(images)))
    return _open(path, shape, dtype)


def told(name: str, count: int, batches: Iterable[Tensor]) -> Iterator[Tensor]:
    """The same batches; whoever waits long is told now and then how far they are, through the log of ``modelmix``."""
    began = last = time.monotonic()
    done = first = 0
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
    """A hash of the images and of all parameters; the version is in the file's name, where it can be seen."""
    content = images.detach().cpu().contiguous().numpy()
    about = [transform.name, transform.parameters, dtype, str(content.dtype), content.shape]
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    digest.update(content.data)
    return digest.hexdigest()[:32]


def _header(shape: tuple[int, ...], dtype: str) -> bytes:
    """The beginning of a .npy file of this shape and format."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": tuple(shape)}
    )
    return file.getvalue()


def _size(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def _open(path: Path, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Maps a cache; ValueError if it is anything but a whole, unchanged file of this shape and format.

    The header is compared and not parsed: a damaged one cannot ask for anything.
    """
    header, size, digest = _header(shape, dtype), _size(shape, dtype), hashlib.blake2b()
    with path.open("rb") as file:
        if file.read(len(header)) != header:
            raise ValueError("its header is damaged or of another array")
        if path.stat().st_size != len(header) + size + digest.digest_size:
            raise ValueError("its size is wrong")
        for start in range(0, size, _BLOCK):  # plain reads: a bad disk under a mapped file ends the process
            digest.update(file.read(min(_BLOCK, size - start)))
        if file.read() != digest.digest():
            raise ValueError("its content is damaged")
    return torch.from_numpy(np.memmap(path, dtype, "c", offset=len(header), shape=shape))


def _write(path: Path, shape: tuple[int, ...], dtype: str, batches: Iterable[Tensor]) -> None:
    """Writes a .npy file under another name and renames it when it is whole.

    An interrupt or a full disk leaves the old file or none. Plain writes, not a mapped file: a disk that fills up under
    a mapped file ends the process instead of raising an error.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path.parent)
        handle, temporary = _temporary(path)
        try:
            with os.fdopen(handle, "wb") as file:
                digest = hashlib.blake2b()
                file.write(_header(shape, dtype))
                for batch in batches:
                    content = batch.cpu().numpy().astype(dtype, order="C").data
                    digest.update(content)
                    file.write(content)
                file.write(digest.digest())
                file.flush()
                os.fsync(file.fileno())
                os.replace(temporary, path)  # still locked: nobody may take it for a file that was left behind
        except BaseException:
            with suppress(FileNotFoundError):  # interrupted right after it got its name
                os.unlink(temporary)
            raise
    except OSError as error:
        raise ModelMixError(
            f"cannot write the cache {path}, {_size(shape, dtype) / 1e9:.2g} GB: {error.strerror or error}. Make room, "
            f"or name another folder with {VARIABLE}."
        ) from None


def _temporary(path: Path) -> tuple[int, str]:
    """A new file beside ``path``, locked while it is open; the lock dies with the process."""
    while True:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        lock(handle, wait=True)
        if os.path.exists(temporary):
            return handle, temporary
        os.close(handle)  # swept by another process before it was locked


def _sweep(folder: Path) -> None:
    """Removes what killed processes left half-written; a file that is still being written is locked, and stays."""
    for path in folder.glob(_TEMPORARY):
        with suppress(OSError), path.open("r+b") as file:
            if lock(file):
                path.unlink()
