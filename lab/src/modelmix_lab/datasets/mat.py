"""Numeric arrays from a MATLAB file of version 5, little-endian, plain or compressed.

scipy.io.loadmat takes far more kinds of files, and a damaged one can crash the process in it: of 1,803 changes of one
byte near the beginning of an uncompressed file, 6 end in a segmentation fault (scipy 1.17.1). Crops made anew have no
published checksum that could be asked first. This reader checks every length before it believes it.

A file is 128 bytes of header, then elements: a kind and a length (32 bits each), then the content, padded to 8 bytes;
an element of up to 4 bytes may keep kind, length and content within 8. An array is an element of elements: flags with
the class of the array, lengths of the axes, name, values. Arrays lie column by column.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelmix.errors import ModelMixError

_HEADER = 128
_LITTLE_ENDIAN_5 = b"\x00\x01IM"
_LENGTHS, _MATRIX, _COMPRESSED = 5, 14, 15
_TYPES = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
_NUMERIC = range(6, 16)
"""The classes of arrays of numbers; cells, structures, text and sparse arrays are others."""


class _UnsoundError(Exception):
    pass


def arrays(raw: bytes, name: str, largest: int) -> dict[str, NDArray[Any]]:
    """Read the arrays of numbers in the bytes of a file, by name, as they are stored; skip other variables.

    Args:
        raw: the bytes. The arrays may share their memory, and cannot be written to.
        name: what an error calls the file.
        largest: a variable that unpacks to more bytes is refused.
    """
    try:
        if len(raw) < _HEADER or raw[124:_HEADER] != _LITTLE_ENDIAN_5:
            raise _UnsoundError("its header is of another kind")
        return dict(_variables(memoryview(raw), largest))
    except (_UnsoundError, zlib.error, UnicodeDecodeError) as error:
        raise ModelMixError(
            f"{name} is cut off, damaged or no MATLAB file of version 5: {error}. Copy it again."
        ) from error


def _variables(data: memoryview, largest: int) -> Iterator[tuple[str, NDArray[Any]]]:
    end = _HEADER
    while end < len(data):
        kind, content, end = _element(data, end)
        if kind == _COMPRESSED:
            stream = zlib.decompressobj()
            unpacked = stream.decompress(content, largest)
            if not stream.eof:
                raise _UnsoundError(f"a packed variable is cut off, or larger than {largest:,} bytes")
            kind, content, _ = _element(memoryview(unpacked), 0)
        if kind == _MATRIX:
            yield from _array(content)


def _array(data: memoryview) -> Iterator[tuple[str, NDArray[Any]]]:
    _, flags, end = _element(data, 0)
    if len(flags) != 8:
        raise _UnsoundError("the flags of a variable are of another kind")
    if flags[0] not in _NUMERIC:
        return
    kind, lengths, end = _element(data, end)
    if kind != _LENGTHS or len(lengths) % 4:
        raise _UnsoundError("the axes of a variable are of another kind")
    shape = struct.unpack(f"<{len(lengths) // 4}i", lengths)
    _, name, end = _element(data, end)
    kind, values, _ = _element(data, end)
    if kind not in _TYPES or min(shape, default=-1) < 0 or len(shape) > 32:
        raise _UnsoundError("the values of a variable are of another kind")
    stored = np.dtype(_TYPES[kind])
    if math.prod(shape) * stored.itemsize != len(values):
        raise _UnsoundError(f"shape {'x'.join(map(str, shape))} does not fit {len(values):,} bytes of {stored}")
    yield str(name, "ascii"), np.frombuffer(values, stored).reshape(shape, order="F")


def _element(data: memoryview, start: int) -> tuple[int, memoryview, int]:
    """Return kind and content of the element at ``start``, and where the next one begins."""
    if start + 8 > len(data):
        raise _UnsoundError("it ends within an element")
    kind, length = struct.unpack_from("<II", data, start)
    begin = start + 8
    if kind >> 16:
        kind, length, begin = kind & 0xFFFF, kind >> 16, start + 4
        if length > 4:
            raise _UnsoundError("an element is of another kind")
    content = data[begin : begin + length]
    if len(content) < length:
        raise _UnsoundError(f"an element should hold {length:,} bytes and has {len(content):,}")
    # A compressed element is not padded: the next one follows at once.
    end = begin + length if kind == _COMPRESSED else start + 8 * math.ceil((begin - start + length) / 8)
    return kind, content, end
