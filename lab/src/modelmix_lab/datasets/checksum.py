"""Files known by their published checksums.

Downloads are held to a SHA-256. The batches of CIFAR-10 and the files of SVHN are recognised by the md5 that their
authors give: it tells a damaged file or another one from the right one, and is no defence against a person who makes
two files with the same md5, so a loader stays careful with what a file holds.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from modelmix.errors import ModelMixError


@dataclass(frozen=True)
class File:
    """A published file: its name, its checksum as ``algorithm:hexadecimal``, and its length in bytes."""

    name: str
    checksum: str
    size: int

    def of(self, content: bytes) -> str:
        """Return the checksum of ``content``, by the algorithm of this file."""
        algorithm = self.checksum.partition(":")[0]
        return f"{algorithm}:{hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()}"


def of_bytes(content: bytes) -> str:
    """Return the md5 of ``content``, in hexadecimal."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def is_missing(path: Path, file: File) -> bool:
    """Return whether ``path`` is absent. A file that is there and not the published one is refused, and left alone."""
    import pooch

    if not path.exists():
        return True
    algorithm, _, published = file.checksum.partition(":")
    try:
        found = pooch.file_hash(str(path), alg=algorithm)
    except OSError as error:
        raise ModelMixError(f"{path} cannot be read: {error.strerror}. Check the path and its permissions.") from error
    if found != published:
        raise ModelMixError(
            f"{path} is there but is not the published file: its {algorithm} is {found}, published is {published}. It "
            "is left alone; move it away to fetch the published one."
        )
    return False
