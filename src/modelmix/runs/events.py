"""Scalars in TensorBoard's event files.

The format is a sequence of records (length, masked CRC-32C of it, payload, masked CRC-32C of the payload); a payload is
a protocol-buffer ``Event``, of which scalars need five fields.

It is written here because the writers of tensorboardX and torch.utils.tensorboard break what a private run needs: they
put the exact time into the header, and time and host name into the name of the file; they write from a thread, so that
a row may be half there after a full disk; they make the file readable by everybody, and a resumed run appends a second
one beside the first. A few lines also spare every user two large packages.
"""

from __future__ import annotations

import errno
import math
import os
import secrets
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from modelmix._files import write_atomically
from modelmix.errors import ModelMixError


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _crc_table()


def masked_crc(data: bytes) -> int:
    """Compute CRC-32C, rotated and shifted as the record format asks."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def record(payload: bytes) -> bytes:
    length = struct.pack("<Q", len(payload))
    return length + struct.pack("<I", masked_crc(length)) + payload + struct.pack("<I", masked_crc(payload))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(number: int, payload: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


def event(step: int, scalars: Mapping[str, float], wall_time: float) -> bytes:
    """Encode one ``Event`` with the scalars of a step."""
    values = b"".join(
        _field(1, _field(1, tag.encode()) + _varint(2 << 3 | 5) + _float32(value)) for tag, value in scalars.items()
    )
    head = _varint(1 << 3 | 1) + struct.pack("<d", wall_time) + _varint(2 << 3) + _varint(step)
    return head + _field(5, values)


def _float32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", math.copysign(math.inf, value))


def _row(row: Mapping[str, Any], wall_time: float) -> bytes:
    scalars = {tag: value for tag, value in row.items() if tag != "step" and value is not None}
    return record(event(row["step"], scalars, wall_time))


class EventFile:
    """The metrics of a run as one file of events in ``folder``.

    A row is a step, the seconds of training so far, and scalars of which some may be None. A resumed run begins a new
    file with the rows up to there, and the old one goes: no point is missing, double or half-written. A ``secret`` file
    is readable by its owner only.
    """

    def __init__(self, folder: str | Path, rows: Sequence[Mapping[str, Any]] = (), *, secret: bool = False) -> None:
        # To ten seconds, as every time that is written: exact ones tell how long a step took.
        now = float(round(time.time(), -1))
        began = now - (rows[-1]["seconds"] if rows else 0.0)
        self.path = Path(folder) / f"events.out.tfevents.{int(now)}.{os.getpid()}.{secrets.token_hex(8)}"
        head = _varint(1 << 3 | 1) + struct.pack("<d", now) + _field(3, b"brain.Event:2")
        data = b"".join([record(head), *(_row(row, began + row["seconds"]) for row in rows)])
        write_atomically(self.path, data, secret=secret)
        for old in self.path.parent.glob("events.out.tfevents.*"):
            if old != self.path:
                with suppress(OSError):
                    old.unlink()

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row whole, or leave the file as it was."""
        try:
            with open(self.path, "ab", buffering=0) as file:
                before, data = file.tell(), _row(row, round(time.time(), -1))
                try:
                    if file.write(data) != len(data):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                except BaseException:
                    file.truncate(before)
                    raise
        except OSError as error:
            raise ModelMixError(f"cannot write {self.path}: {error.strerror}.") from None
