"""One published file from the network: verified, resumable, and under its own name only when it is whole."""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

from modelmix._version import __version__
from modelmix.errors import ModelMixError
from modelmix_lab.datasets import checksum
from modelmix_lab.datasets.checksum import File

_PIECE = 1 << 18
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
"""What a server answers when asking again may help."""


@dataclass(frozen=True)
class RetryPolicy:
    """How long to bear with a network.

    Args:
        timeout: seconds without a byte after which a connection is given up.
        attempts: connections in a row that brought nothing, after which the download is given up.
        pause: seconds before the next connection; doubled after each that brought nothing.
    """

    timeout: float = 30.0
    attempts: int = 5
    pause: float = 1.0


def missing(path: Path, file: File) -> bool:
    """Whether ``path`` is not there yet. A file that is there and not the published one is refused, and left alone."""
    if not path.exists():
        return True
    found = checksum.of_file(path)
    if found != file.md5:
        raise ModelMixError(
            f"{path} is there but is not the published file: its md5 is {found}, published is {file.md5}. It is left "
            "alone; move it away to fetch the published one."
        )
    return False


def download(
    url: str,
    path: Path,
    file: File,
    *,
    retry: RetryPolicy,
    watch: Callable[[int], None],
    note: Callable[[str], None],
) -> bool:
    """Brings the file at ``url`` to ``path``; False when it was there already.

    Guarantees: ``path`` appears in one step and has the published md5. What an interrupted download brought stays
    beside it, ending in .part, and the next call goes on from there; if it turns out wrong it is removed.

    Args:
        url: http or https.
        path: where the file goes; folders are made if need be.
        file: its length and md5.
        retry: with the network.
        watch: called with the number of bytes held, now and then.
        note: called with a line for the user.
    """
    if not missing(path, file):
        return False
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or not url.isascii():
        raise ModelMixError(f"{url!r} cannot be fetched: allowed are plain addresses that begin with http or https.")
    with _Part(path.with_name(path.name + ".part")) as part:
        found_before = part.length > 0
        if found_before:
            note(f"going on with {part.path}, which holds {part.length:,} of {file.size:,} bytes")
        while True:
            _complete(url, part, file, retry, watch)
            if (part.length, part.md5) == (file.size, file.md5):
                part.becomes(path)
                return True
            told = f"{part.length:,} bytes with md5 {part.md5}"
            part.clear()
            if not found_before:
                raise ModelMixError(
                    f"{url} is not the published file: it gave {told}, published are {file.size:,} with {file.md5}. "
                    "It was removed; try again later, or another source with --url-base."
                )
            note(f"{part.path} was not the beginning of the published file: it is removed, and all is fetched anew")
            found_before = False


def _complete(url: str, part: _Part, file: File, retry: RetryPolicy, watch: Callable[[int], None]) -> None:
    """Brings ``part`` to the length of the file or beyond it, over as many connections as it takes."""
    failures = 0
    found_before = part.length > 0
    while part.length < file.size:
        before = part.length
        try:
            _receive(url, part, file.size, retry.timeout, watch)
            reason = "the connection ended early"
        except urllib.error.HTTPError as error:
            error.close()
            reason = f"the server answered {error.code} {error.reason}"
            if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and before:
                part.clear()  # the server's file ends before ours does: they are not the same
                if not found_before:  # the server gave all of it: asking again would bring the same, for ever
                    raise ModelMixError(
                        f"{url} is not the published file: it ends after {before:,} bytes, published are "
                        f"{file.size:,}. It was removed; try again later, or another source with --url-base."
                    ) from None
                found_before = False
            elif error.code not in _TRANSIENT:
                raise ModelMixError(
                    f"{url} cannot be fetched: {reason}. Check the address, or give another source with --url-base."
                ) from None
        except (http.client.InvalidURL, UnicodeError) as error:
            raise ModelMixError(f"{url!r} cannot be fetched: {error}. Check the address.") from None
        except (OSError, http.client.HTTPException) as error:
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            reason = " ".join(str(cause).split()) or type(cause).__name__
        if part.length > before:
            failures = 0
            continue
        failures += 1
        if failures >= retry.attempts:
            kept = (
                f"{part.length:,} of {file.size:,} bytes are kept in {part.path}" if part.length else "nothing is kept"
            )
            raise ModelMixError(
                f"{url} could not be fetched in {failures} attempts: {reason}; {kept}. Check the network and run the "
                "same command again, or give another source with --url-base."
            )
        time.sleep(retry.pause * 2 ** (failures - 1))


def _receive(url: str, part: _Part, size: int, timeout: float, watch: Callable[[int], None]) -> None:
    """Appends what one connection brings."""
    headers = {"User-Agent": f"modelmix/{__version__}"}
    if part.length:
        headers["Range"] = f"bytes={part.length}-"
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout) as response:
        total = response.headers.get("Content-Length" if response.status == http.HTTPStatus.OK else "Content-Range", "")
        if (total := total.rpartition("/")[2]).isdecimal() and int(total) != size:
            raise ModelMixError(  # a page that says "log in first", most often; our part may still be good
                f"{url} is not the published file: the server has {int(total):,} bytes under this address, published "
                f"are {size:,}. Check the network, or give another source with --url-base."
            )
        if response.status == http.HTTPStatus.OK:
            part.clear()  # a server without ranges sends all of it again
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {part.length}-"):
            part.clear()  # what it sends does not belong here; the next connection asks for the whole file
            return
        # read1 gives what has arrived: a connection that stalls later loses none of it.
        while part.length <= size and (piece := response.read1(_PIECE)):
            part.append(piece)
            watch(part.length)


class _Part:
    """The bytes so far, on disk, with their md5 kept along. An empty one leaves no file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.length = 0
        self._digest = hashlib.md5(usedforsecurity=False)

    def __enter__(self) -> _Part:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab+", buffering=0)  # unbuffered: a full disk shows at once
            self._lock()
            self._file.seek(0)
            while piece := self._file.read(_PIECE):
                self._take(piece)
        except OSError as error:
            raise self._failed(error) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._file.closed:
            self._file.close()
            if not self.length:
                self.path.unlink(missing_ok=True)

    @property
    def md5(self) -> str:
        return self._digest.hexdigest()

    def append(self, piece: bytes) -> None:
        rest = memoryview(piece)
        try:
            while rest:
                count = self._file.write(rest) or 0
                self._take(rest[:count])
                rest = rest[count:]
        except OSError as error:
            raise self._failed(error) from None

    def clear(self) -> None:
        self._file.truncate(0)
        self.length = 0
        self._digest = hashlib.md5(usedforsecurity=False)

    def becomes(self, path: Path) -> None:
        """Gives the file its name, once its bytes are safely on disk."""
        try:
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self.path, path)
        except OSError as error:
            raise self._failed(error) from None

    def _take(self, piece: bytes | memoryview) -> None:
        self._digest.update(piece)
        self.length += len(piece)

    def _lock(self) -> None:
        """Two downloads into one file would spoil it; where the system has no locks, the md5 finds out."""
        try:
            import fcntl
        except ModuleNotFoundError:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ModelMixError(f"another process is fetching {self.path} right now: wait until it is done.") from None

    def _failed(self, error: OSError) -> ModelMixError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return ModelMixError(
                f"the disk is full: {self.path} holds {self.length:,} bytes and cannot grow. Make room and run the "
                "same command again, which goes on from there, or choose another place with --data-dir."
            )
        return ModelMixError(
            f"cannot write {self.path}: {error.strerror or error}. Choose another place with --data-dir."
        )
