"""One published file from the network, by pooch: verified, resumable, and under its own name only when it is complete.

pooch compares the checksum and gives the file its name. It knows neither how to continue an interrupted download nor
how long a file may be: the downloader here does.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from urllib3.exceptions import HTTPError, ProtocolError

from modelmix._files import hold_lock
from modelmix._version import __version__
from modelmix.errors import ModelMixError
from modelmix_lab.datasets.checksum import File, is_missing

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


def download(
    url: str,
    path: Path,
    file: File,
    *,
    retry: RetryPolicy,
    watch: Callable[[int], None],
    note: Callable[[str], None],
) -> bool:
    """Download the file at ``url`` to ``path``; return False if it was there already.

    Guarantees: ``path`` appears in one step and has the published checksum. What an interrupted download brought stays
    beside it, ending in .part, and the next call continues it; if it turns out wrong it is removed.

    Args:
        url: http or https.
        path: where the file goes; folders are made if need be.
        file: its length and checksum.
        retry: how long to bear with the network.
        watch: called with the number of bytes held, now and then.
        note: called with a line for the user.
    """
    if not is_missing(path, file):
        return False
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or not url.isascii() or " " in url:
        raise ModelMixError(f"{url!r} cannot be fetched: allowed are plain addresses that begin with http or https.")
    downloader = _ResumingDownloader(path.with_name(path.name + ".part"), file, retry, watch)
    try:
        with hold_lock(path):
            try:
                _retrieve(url, path, file, downloader, note)
            finally:
                if not downloader.length:
                    downloader.part.unlink(missing_ok=True)
    except BlockingIOError:
        raise ModelMixError(f"another process is fetching {path} right now: wait until it is done.") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelMixError(
                f"the disk is full: {downloader.part} holds {downloader.length:,} bytes and cannot grow. Make room and "
                "run the same command again, which continues, or choose another place with --data-dir."
            ) from None
        raise ModelMixError(
            f"cannot write {downloader.part}: {error.strerror or error}. Choose another place with --data-dir."
        ) from None
    return True


def _retrieve(url: str, path: Path, file: File, downloader: _ResumingDownloader, note: Callable[[str], None]) -> None:
    import pooch

    pooch.get_logger().setLevel(logging.WARNING)
    while True:
        found_before = downloader.length
        if found_before:
            note(f"continuing {downloader.part}, which holds {found_before:,} of {file.size:,} bytes")
        try:
            pooch.retrieve(url, file.checksum, path.name, path.parent, downloader=downloader)
            return
        except ModelMixError:
            raise
        except ValueError:  # of the checksum; pooch has removed what was downloaded
            if not found_before:
                raise ModelMixError(
                    f"{url} is not the published file: it gave {downloader.given:,} bytes of another checksum than the "
                    f"published {file.checksum}. It was removed; try again later, or another source with --url-base."
                ) from None
            note(
                f"{downloader.part} was not the beginning of the published file: it is removed, and all is fetched anew"
            )


class _ResumingDownloader:
    """A downloader of pooch's that continues a partial file, and stops soon after the published length."""

    def __init__(self, part: Path, file: File, retry: RetryPolicy, watch: Callable[[int], None]) -> None:
        self.part, self.given = part, 0
        self._file, self._retry, self._watch = file, retry, watch
        self._whole = False  # whether all of the part came from this server

    @property
    def length(self) -> int:
        """Bytes of the partial file."""
        with suppress(FileNotFoundError):
            return self.part.stat().st_size
        return 0

    def __call__(self, url: str, output_file: str, pooch: object, check_only: bool = False) -> None:
        """Download to ``output_file`` over as many connections as it takes."""
        failures = 0
        self._whole = not self.length
        while (before := self.length) < self._file.size:
            reason = self._receive(url, before)
            if self.length > before:
                failures = 0
                continue
            failures += 1
            if failures >= self._retry.attempts:
                kept = (
                    f"{before:,} of {self._file.size:,} bytes are kept in {self.part}" if before else "nothing is kept"
                )
                raise ModelMixError(
                    f"{url} could not be fetched in {failures} attempts: {reason}; {kept}. Check the network and run "
                    "the same command again, or give another source with --url-base."
                )
            time.sleep(self._retry.pause * 2 ** (failures - 1))
        with self.part.open("rb+", buffering=0) as file:
            os.fsync(file.fileno())
        self.given = self.length
        os.replace(self.part, output_file)

    def _receive(self, url: str, start: int) -> str:
        """Append what one connection brings, and return why it ended."""
        headers = {"User-Agent": f"modelmix/{__version__}", "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        try:
            with requests.get(url, headers=headers, stream=True, timeout=self._retry.timeout) as response:
                return self._take(url, start, response)
        except (requests.exceptions.InvalidURL, UnicodeError) as error:
            raise ModelMixError(f"{url!r} cannot be fetched: {error}. Check the address.") from None
        except ProtocolError:
            return "the connection ended early"
        except (requests.RequestException, HTTPError) as error:
            return " ".join(str(error).split()) or type(error).__name__

    def _take(self, url: str, start: int, response: requests.Response) -> str:
        code, size = response.status_code, self._file.size
        answer = f"the server answered {code} {response.reason}"
        if code == requests.codes.requested_range_not_satisfiable and start:
            self.part.unlink()  # the server's file ends before ours does: they are not the same
            if self._whole:  # asking again would bring the same, for ever
                raise self._unpublished(url, f"it ends after {start:,} bytes, published are {size:,}. It was removed")
            self._whole = True
            return answer
        if code in _TRANSIENT:
            return answer
        if not response.ok:
            raise ModelMixError(
                f"{url} cannot be fetched: {answer}. Check the address, or give another source with --url-base."
            )
        whole = code == requests.codes.ok  # a server without ranges sends all of it again
        total = response.headers.get("Content-Length" if whole else "Content-Range", "").rpartition("/")[2]
        if (
            total.isdecimal() and int(total) != size
        ):  # most often a page that asks to log in; our part may still be good
            raise self._unpublished(
                url, f"the server has {int(total):,} bytes under this address, published are {size:,}"
            )
        self._whole = self._whole or whole
        if not whole and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            self.part.unlink(missing_ok=True)  # another range: the next connection asks for the whole file
            self._whole = True
            return "the server sent another range"
        with self.part.open("wb" if whole else "ab", buffering=0) as file:  # unbuffered: a full disk shows at once
            # read1 returns what has arrived: a connection that stalls later loses none of it.
            raw: Any = response.raw
            while (held := file.tell()) <= size and (piece := raw.read1(_PIECE)):
                rest = memoryview(piece)
                while rest:
                    rest = rest[file.write(rest) or 0 :]
                self._watch(held + len(piece))
        return "the connection ended early"

    @staticmethod
    def _unpublished(url: str, why: str) -> ModelMixError:
        return ModelMixError(
            f"{url} is not the published file: {why}. Check the network, or give another source with --url-base."
        )
