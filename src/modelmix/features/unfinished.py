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

from modelmix._files import lock, write_atomically
from modelmix.errors import ModelMixError

DIGEST_BYTES = hashlib.blake2b().digest_size
"""What follows the rows of a whole file."""

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
        self._done = (0, hashlib.blake2b())  # one pair: an interrupt never comes between the two
        if self._lasting:
            self._go_on()
        self._told = self.rows  # by the note
        self._file.truncate(len(header) + self.rows * row)
        self._file.seek(0)
        self._file.write(header)
        self._file.seek(0, os.SEEK_END)
        self._noted = time.monotonic()

    @property
    def rows(self) -> int:
        """Rows that are there."""
        return self._done[0]

    def _go_on(self) -> None:
        """Takes what the note tells, if it is there and unchanged."""
        try:
            note = json.loads(self._note.read_text(encoding="utf-8"))
            rows, told = int(note["rows"]), str(note["digest"])
            if rows < 0 or self._file.read(len(self._header)) != self._header:
                return
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return
        digest = digest_of(self._file, rows * self._row)
        if digest is not None and digest.hexdigest() == told:
            self._done = (rows, digest)

    def add(self, rows: int, content: memoryview) -> None:
        digest = self._done[1].copy()
        digest.update(content)
        self._file.write(content)
        self._done = (self.rows + rows, digest)
        if time.monotonic() - self._noted > _BETWEEN:
            self._write_note()

    def _write_note(self) -> None:
        """Errors are those of the rows; a note that cannot be written costs no more than going on from an older one."""
        self._noted = time.monotonic()
        os.stat(self._name)  # gone with its folder: to be said now and not when all is computed
        if not self._lasting or not self.rows:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        rows, digest = self._done
        with suppress(ModelMixError):
            write_atomically(self._note, json.dumps({"rows": rows, "digest": digest.hexdigest()}), secret=True)
            self._told = rows

    def finish(self) -> None:
        """Gives the file its digest and its name."""
        self._file.write(self._done[1].digest())
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._name, self._path)  # still locked: nobody may take it for a file that was left behind
        self._file.close()
        self._forget_note()

    def stop(self) -> None:
        """Keeps what is there for another process, on a full disk what the last note tells; nothing if that is none."""
        with suppress(OSError):
            self._write_note()
        if not self._told:
            return self.discard()
        with suppress(OSError):  # closing writes what is left
            self._file.close()
        return None

    def discard(self) -> None:
        with suppress(OSError):  # closing writes what is left, to a disk that may be full
            self._file.close()
        with suppress(OSError):  # interrupted right after it got its name, or the folder is gone or closed to us
            os.unlink(self._name)
        self._forget_note()

    def _forget_note(self) -> None:
        if self._lasting:
            with suppress(OSError):
                self._note.unlink()


def digest_of(file: IO[bytes], size: int) -> hashlib.blake2b | None:
    """Of the next ``size`` bytes of a file, by plain reads; None if there are fewer."""
    digest = hashlib.blake2b()
    while size and (piece := file.read(min(_BLOCK, size))):
        digest.update(piece)
        size -= len(piece)
    return None if size else digest


def _locked(name: Path) -> tuple[IO[bytes], str] | None:
    """The file of that name, made if need be; None if another process writes it, or where locks are not known.

    None as well for what is no file of ours: that of another user, a link, a folder.
    """
    while True:
        try:
            handle = os.open(name, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
        except OSError:
            return None
        file: IO[Any] = os.fdopen(handle, "r+b")
        if not lock(file):
            file.close()
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(name)):
                with suppress(PermissionError):
                    os.chmod(name, 0o600)  # it was made so, and may have been copied since
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

    A file that is still being written is locked, and stays; but for notes, which are never locked: they may be written
    right now.
    """
    old = time.time() - _ABANDONED
    for path in (*folder.glob(f".{pattern}.*{_TEMPORARY}"), *folder.glob(f".{pattern}{_PART}")):
        waits = path.suffix == _PART or f"{_NOTE}." in path.name
        with suppress(OSError):
            if not waits or path.stat().st_mtime < old:
                _remove(path)


def forget(path: Path) -> None:
    """Removes what a process that was stopped left of a file that another one has finished since."""
    part = path.with_name(f".{path.name}{_PART}")
    with suppress(OSError):
        if os.path.exists(part):
            _remove(part)
        else:  # its own process was killed between the last two steps
            part.with_suffix(_NOTE).unlink(missing_ok=True)


def _remove(path: Path) -> None:
    """With its note; unless it is locked."""
    with path.open("r+b") as file:
        if lock(file):
            path.unlink()
            path.with_suffix(_NOTE).unlink(missing_ok=True)
