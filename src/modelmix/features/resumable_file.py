"""A large file that is written row by row, and continued by the next process if this one is stopped.

Until it is complete it is called ``.NAME.part``. Beside it lies ``.NAME.note``: how many rows were safely on disk at
the last checkpoint, and their digest. Rows that came after, or that a crash damaged, are computed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from modelmix._files import write_atomically
from modelmix.errors import ModelMixError

DIGEST_BYTES = hashlib.blake2b().digest_size
"""What follows the rows of a complete file."""

_BLOCK = 1 << 20  # bytes that are read at a time
_BETWEEN = 15.0  # seconds between two checkpoints
_ABANDONED = 30 * 86400  # seconds after which nobody will continue it


class ResumableFile:
    """The file at ``path`` until it is complete: ``header``, then rows of ``row_bytes`` bytes, then their digest.

    Only its owner may read it. One process writes it at a time: hold a lock.

    Args:
        resume: whether to continue with the rows of another process.
    """

    def __init__(self, path: Path, header: bytes, row_bytes: int, *, resume: bool) -> None:
        self._path, self._header, self._row_bytes, self._resume = path, header, row_bytes, resume
        self._part, self._note = (path.with_name(f".{path.name}.{kind}") for kind in ("part", "note"))
        handle = os.open(self._part, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
        self._file: IO[bytes] = os.fdopen(handle, "r+b")
        os.chmod(self._part, 0o600)  # it was made so, and may have been copied since
        # One pair, so that an interrupt never comes between the rows and their digest.
        self._state = (self._read_note() if resume else None) or (0, hashlib.blake2b())
        self._checkpointed = self.rows
        self._file.truncate(len(header) + self.rows * row_bytes)
        self._file.seek(0)
        self._file.write(header)
        self._file.seek(0, os.SEEK_END)
        self._last = time.monotonic()

    @property
    def rows(self) -> int:
        """Rows that are written."""
        return self._state[0]

    def append(self, rows: int, content: memoryview) -> None:
        """Append rows, and make a checkpoint if the last one is a while ago."""
        digest = self._state[1].copy()
        digest.update(content)
        self._file.write(content)
        self._state = (self.rows + rows, digest)
        if time.monotonic() - self._last > _BETWEEN:
            self._checkpoint()

    def finish(self) -> None:
        """Append the digest and give the file its name."""
        self._file.write(self._state[1].digest())
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._part, self._path)
        self._file.close()
        with suppress(OSError):
            self._note.unlink()

    def suspend(self) -> None:
        """Keep what is written for another process: on a full disk up to the last checkpoint, and nothing without."""
        with suppress(OSError):
            self._checkpoint()
        if not self._checkpointed:
            self.discard()
        with suppress(OSError):  # closing writes what is left
            self._file.close()

    def discard(self) -> None:
        """Delete what is written."""
        with suppress(OSError):  # closing writes what is left, to a disk that may be full
            self._file.close()
        for path in (self._part, self._note):
            with suppress(OSError):  # interrupted right after it got its name, or the folder is gone
                path.unlink()

    def _checkpoint(self) -> None:
        """Errors are those of the rows; a note that cannot be written only means resuming from an older one."""
        self._last = time.monotonic()
        os.stat(self._part)  # gone with its folder: to be said now and not when all is computed
        if not self._resume or not self.rows:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        rows, digest = self._state
        with suppress(ModelMixError):
            write_atomically(self._note, json.dumps({"rows": rows, "digest": digest.hexdigest()}), secret=True)
            self._checkpointed = rows

    def _read_note(self) -> tuple[int, hashlib.blake2b] | None:
        """Return the rows of the last checkpoint and their digest; None unless they are there and unchanged."""
        try:
            note = json.loads(self._note.read_text(encoding="utf-8"))
            rows, expected = int(note["rows"]), str(note["digest"])
            if rows < 0 or self._file.read(len(self._header)) != self._header:
                return None
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None
        digest = digest_of(self._file, rows * self._row_bytes)
        return (rows, digest) if digest is not None and digest.hexdigest() == expected else None


def digest_of(file: IO[bytes], size: int) -> hashlib.blake2b | None:
    """Return the digest of the next ``size`` bytes of a file, by plain reads; None if there are fewer."""
    digest = hashlib.blake2b()
    while size and (piece := file.read(min(_BLOCK, size))):
        digest.update(piece)
        size -= len(piece)
    return None if size else digest


def sweep(folder: Path, pattern: str) -> None:
    """Delete what stopped processes left of files of this pattern, once nobody has touched it for a month."""
    for path in folder.glob(f".{pattern}.*"):
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - _ABANDONED:
                path.unlink()
