"""The idx format: two zero bytes, a type, the number of axes, their lengths (32 bits, big-endian), then the values.

Only unsigned bytes (type 8) are read and written, plain or packed with gzip or xz.
"""

from __future__ import annotations

import gzip
import io
import lzma
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from modelmix.errors import ModelMixError

_MAGIC = bytes([0, 0, 8])
_MOST_AXES = 4
_GZIP = b"\x1f\x8b"
_XZ = b"\xfd7zXZ\x00"
# One bit more of literal context than the default packs image columns better.
_XZ_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4}]


def read(path: str | Path) -> NDArray[np.uint8]:
    """Read the array in a file. How it is packed is seen from its first bytes, not from its name."""
    try:
        packed = Path(path).read_bytes()
    except OSError as error:
        raise ModelMixError(f"{path} cannot be read: {error.strerror}. Check the path and its permissions.") from error
    return decode(packed, str(path))


def decode(packed: bytes, name: str) -> NDArray[np.uint8]:
    """Decode the array in the bytes of a file; ``name`` is what an error calls it."""
    raw = _unpack(packed, name)
    axes = raw[3] if len(raw) > 3 else 1
    if not raw.startswith(_MAGIC[: len(raw)]) or not 1 <= axes <= _MOST_AXES:
        raise ModelMixError(
            f"{name} is not an idx file of unsigned bytes: it begins with {raw[:4].hex(' ')}, "
            f"allowed is 00 00 08 and a number of axes from 1 to {_MOST_AXES}. Check that it is the right file."
        )
    start = 4 + 4 * axes
    if len(raw) < start:
        raise ModelMixError(f"{name} is cut off: its header needs {start} bytes, it holds {len(raw)}. Copy it again.")
    shape = struct.unpack(f">{axes}I", raw[4:start])
    due, held = math.prod(shape), len(raw) - start
    if due == 0:
        raise ModelMixError(f"{name} is empty: its header says {shape}. Check that it is the right file.")
    told = f"shape {'x'.join(map(str, shape))} needs {due} bytes of data, it holds {held}"
    if held < due:
        raise ModelMixError(f"{name} is cut off: {told}. Copy it again.")
    if held > due:
        raise ModelMixError(f"{name} is too long: {told}. Copy it again.")
    values: NDArray[np.uint8] = np.frombuffer(raw, np.uint8, offset=start).reshape(shape)
    return np.array(values)


def write(path: str | Path, array: NDArray[np.uint8]) -> None:
    """Write ``array``; a name that ends in .gz or .xz packs it. The same array gives the same bytes every time."""
    if array.dtype != np.uint8 or not 1 <= array.ndim <= _MOST_AXES or array.size == 0:
        raise ModelMixError(
            f"{array.dtype} with shape {array.shape} cannot be written to {path}: allowed is uint8 "
            f"with 1 to {_MOST_AXES} axes, not empty. Convert it first."
        )
    raw = _MAGIC + struct.pack(f">B{array.ndim}I", array.ndim, *array.shape) + array.tobytes()
    path = Path(path)
    if path.suffix == ".gz":
        raw = gzip.compress(raw, 9, mtime=0)
    elif path.suffix == ".xz":
        raw = lzma.compress(raw, filters=_XZ_FILTERS)
    path.write_bytes(raw)


def _unpack(packed: bytes, name: str) -> bytes:
    try:
        if packed.startswith(_GZIP):
            return gzip.decompress(packed)
        if packed.startswith(_XZ):
            return lzma.LZMAFile(io.BytesIO(packed)).read()
    except EOFError as error:
        raise ModelMixError(f"{name} is cut off: its packed data end too early. Copy it again.") from error
    except (gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise ModelMixError(f"{name} is damaged: it cannot be unpacked ({error}). Copy it again.") from error
    return packed
