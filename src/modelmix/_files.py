"""Writing a file so that a reader, or a power cut, meets the old one or the new one and never half of one."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from modelmix.errors import ModelMixError

TEMPORARY = ".*.tmp"
"""The names under which files are written before they get their own; one that stays was left by a killed process."""


def write_atomically(path: str | Path, content: str | bytes, *, secret: bool = False) -> None:
    """Replaces ``path`` by ``content`` in one step; the folder is made if need be.

    A symbolic link stays one: the file that it leads to is replaced. A ``secret`` file is readable by its owner only;
    any other gets the usual permissions.
    """
    given, path = path, Path(os.path.realpath(path))  # messages name what was given
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        _require_regular(given)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if not secret:
                os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, path)
        except BaseException:
            with suppress(FileNotFoundError):  # interrupted right after it got its name
                os.unlink(temporary)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise ModelMixError(f"cannot write {given}: {error.strerror or error}.") from None


def _require_regular(path: str | Path) -> None:
    """Refuse to put a file in the place of a folder, a pipe or a device."""
    with suppress(FileNotFoundError, NotADirectoryError):
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise ModelMixError(f"cannot write {path}: it is a folder; give a file.")
        if not stat.S_ISREG(mode):
            raise ModelMixError(f"cannot write {path}: it is a pipe, a socket or a device; give an ordinary file.")


@contextmanager
def alone_with(path: str | Path) -> Iterator[Path]:
    """Hold the lock beside a file, for whoever reads it and writes what follows from it; yield its real path.

    The lock is a file of its own, because the file itself is replaced at every write; it stays where it is.
    """
    path = Path(os.path.realpath(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = open(path.with_name(f".{path.name}.lock"), "a")  # noqa: SIM115, closed below
    except OSError as error:
        raise ModelMixError(f"cannot write {path}: {error.strerror or error}.") from None
    with beside:
        lock(beside, wait=True)
        yield path


@contextmanager
def hold_lock(path: Path, waiting: Callable[[], object] | None = None) -> Iterator[None]:
    """Hold a lock for writing ``path``, in a file beside it; it dies with the process and is gone afterwards.

    If another process holds it, ``waiting`` is called and the lock waited for; without ``waiting``, BlockingIOError is
    raised. Where a disk knows no such locks, the presence of the file is the lock.
    """
    from filelock import FileLock, Timeout, UnixFileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    held = FileLock(path.with_name(f".{path.name}.lock"), mode=0o600, thread_local=False)
    try:
        held.acquire(timeout=0)
    except Timeout:
        if waiting is None:
            raise BlockingIOError(f"another process writes {path}") from None
        waiting()
        held.acquire()
    try:
        yield
    finally:
        if isinstance(held, UnixFileLock):  # deleted while held: whoever waits notices, and takes a new file
            with suppress(OSError):
                os.unlink(held.lock_file)
        held.release()


def lock(file: int | IO[Any], *, wait: bool = False) -> bool | None:
    """Takes the lock of an open file; it dies with the process.

    Returns:
        False if another process has it, and None where system or disk know no such locks.
    """
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def sync_folder(folder: Path) -> None:
    """Makes a renaming or a removal itself durable, where system and disk can do that for a folder."""
    if hasattr(os, "O_DIRECTORY"):
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
