"""Scalars in TensorBoard's event files.

The format is a sequence of records (length, masked CRC-32C of it, payload, masked CRC-32C of the payload); a payload is
a protocol-buffer ``Event``, of which scalars need five fields. A few lines here spare every user two large packages.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path

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
    """CRC-32C, rotated and shifted as the record format asks."""
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
    """One ``Event`` with the scalars of a step."""
    values = b"".join(
        _field(1, _field(1, tag.encode()) + _varint(2 << 3 | 5) + struct.pack("<f", value))
        for tag, value in scalars.items()
    )
    head = _varint(1 << 3 | 1) + struct.pack("<d", wall_time) + _varint(2 << 3) + _varint(step)
    return head + _field(5, values)


class EventFile:
    """One file of events in ``folder``; a resumed run begins another, as TensorBoard expects."""

    def __init__(self, folder: str | Path) -> None:
        now = time.time()
        self.path = Path(folder) / f"events.out.tfevents.{int(now)}.{os.getpid()}.{time.monotonic_ns()}"
        head = _varint(1 << 3 | 1) + struct.pack("<d", now) + _field(3, b"brain.Event:2")
        self._append(record(head))

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        self._append(record(event(step, scalars, time.time())))

    def _append(self, data: bytes) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab") as file:
                file.write(data)
        except OSError as error:
            raise ModelMixError(f"cannot write {self.path}: {error.strerror}.") from None
