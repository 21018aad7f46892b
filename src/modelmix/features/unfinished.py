"""A large file that is written row by row, and gone on with by the next process if this one is stopped.

Beside the rows lies a note of how many there were when it was last looked, and their digest. Rows that a crash damaged
or that came after are not used.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from modelmix.files import lock, write_atomically

_BLOCK = 1 << 20  # bytes that are read at a time
_BETWEEN = 15.0  # seconds between two notes
_ABANDONED = 30 * 86400  # seconds after which nobody will go on with it
_PART, _NOTE, _TEMPORARY = ".part", ".note", ".tmp"


class Unfinished:
    """The file at ``path`` before it is whole: ``header``, then rows of ``row`` bytes, then their digest.

    Only its owner may read it. It is locked while it is written: a second process writes one of its own.

    Args:
        lasting: whether rows of another process may be gone on with.
    """

    def __init__(self, path: Path, header: bytes, row: int, *, lasting: bool) -> None:
        self._path, self._header, self._row = path, header, row
        self._note = path.with_name(f".{path.name}{_NOTE}")
        found = _locked(path.with_name(f".{path.name}{_PART}")) if lasting else None
        self._lasting = found is not None
        self._file, self._name = found or _temporary(path)
        self._digest, self.rows = hashlib.blake2b(), 0
        """Rows that are there."""
        if self._lasting:
            self._go_on()
        self._file.truncate(len(header) + self.rows * row)
        self._file.seek(0)
        self._file.write(header)
        self._file.seek(0, os.SEEK_END)
        self._noted = time.monotonic()

    def _go_on(self) -> None:
        """Takes what the note tells, if it is there and unchanged."""
        try:
            note = json.loads(self._note.read_text(encoding="utf-8"))
            rows, told = int(note["rows"]), str(note["digest"])
            if rows < 0 or self._file.read(len(self._header)) != self._header:
                return
        except (OSError, ValueError, KeyError, TypeError):
            return
        digest, left = hashlib.blake2b(), rows * self._row
        while left and (piece := self._file.read(min(_BLOCK, left))):
            digest.update(piece)
            left -= len(piece)
        if not left and digest.hexdigest() == told:
            self._digest, self.rows = digest, rows

    def add(self, rows: int, content: memoryview) -> None:
        self._digest.update(content)
        self._file.write(content)
        self.rows += rows
        if time.monotonic() - self._noted > _BETWEEN:
            self._write_note()

    def _write_note(self) -> None:
        if not self._lasting or not self.rows:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        write_atomically(self._note, json.dumps({"rows": self.rows, "digest": self._digest.hexdigest()}), secret=True)
        self._noted = time.monotonic()

    def finish(self) -> None:
        """Gives the file its digest and its name."""
        self._file.write(self._digest.digest())
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._name, self._path)  # still locked: nobody may take it for a file that was left behind
        self._file.close()
        self._forget_note()

    def stop(self) -> None:
        """Keeps what is there for another process, if it is worth it."""
        if not (self._lasting and self.rows):
            return self.discard()
        self._write_note()
        self._file.close()
        return None

    def discard(self) -> None:
        with suppress(OSError):  # closing writes what is left, to a disk that may be full
            self._file.close()
        with suppress(FileNotFoundError):  # interrupted right after it got its name
            os.unlink(self._name)
        self._forget_note()

    def _forget_note(self) -> None:
        if self._lasting:
            with suppress(FileNotFoundError):
                self._note.unlink()


def _locked(name: Path) -> tuple[IO[bytes], str] | None:
    """The file of that name, made if need be; None if another process writes it, or where locks are not known."""
    while True:
        file: IO[Any] = os.fdopen(os.open(name, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
        if not lock(file):
            file.close()
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(name)):
                return file, str(name)
        file.close()  # finished or removed by another process before it was locked


def _temporary(path: Path) -> tuple[IO[bytes], str]:
    """A new file beside ``path``, locked while it is open; the lock dies with the process."""
    while True:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_TEMPORARY)
        lock(handle, wait=True)
        if os.path.exists(name):
            return os.fdopen(handle, "r+b"), name
        os.close(handle)  # swept by another process before it was locked


def sweep(folder: Path, pattern: str) -> None:
    """Removes what killed processes left behind of files of this pattern, and what nobody went on with for a month.

    A file that is still being written is locked, and stays.
    """
    old = time.time() - _ABANDONED
    for path in (*folder.glob(f".{pattern}.*{_TEMPORARY}"), *folder.glob(f".{pattern}{_PART}")):
        with suppress(OSError), path.open("r+b") as file:
            if (path.suffix == _TEMPORARY or path.stat().st_mtime < old) and lock(file):
                path.unlink()
                path.with_suffix(_NOTE).unlink(missing_ok=True)
