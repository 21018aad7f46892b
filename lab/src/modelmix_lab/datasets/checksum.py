"""Files known by their published md5.

md5 is what the publishers give. It tells a damaged file or another one from the right one; it is no defence against a
person who makes two files with the same md5, so a loader stays careful with what a file holds.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from modelmix.errors import ModelMixError

_PIECE = 1 << 20


@dataclass(frozen=True)
class File:
    """A published file: its name, md5 and length in bytes."""

    name: str
    md5: str
    size: int


def of_bytes(content: bytes) -> str:
    """The md5 of ``content``, in hexadecimal."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def of_file(path: Path) -> str:
    """The md5 of a file, read piece by piece."""
    digest = hashlib.md5(usedforsecurity=False)
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
    except OSError as error:
        raise ModelMixError(f"{path} cannot be read: {error.strerror}. Check the path and its permissions.") from error
    return digest.hexdigest()
