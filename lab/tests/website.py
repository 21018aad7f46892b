"""A web server with bad habits, on this machine alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Site:
    """What the server does. ``cuts`` and ``statuses`` are used up, one a request; None is none."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    cuts: list[int | None] = field(default_factory=list)
    statuses: list[int | None] = field(default_factory=list)
    stall: float = 0.0
    shift: int = 0
    tell_length: bool = True
    asked: list[tuple[str, str | None]] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    site: Site

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        site, asked = self.site, self.headers.get("Range")
        site.asked.append((self.path, asked))
        status = site.statuses.pop(0) if site.statuses else None
        content = site.files.get(self.path.lstrip("/"))
        if status or content is None:
            self.send_error(status or 404)
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and site.ranges else None
        if start is not None and start >= len(content):
            self.send_error(416)
            return
        body = content[start or 0 :]
        self.send_response(200 if start is None else 206)
        if site.tell_length:
            self.send_header("Content-Length", str(len(body)))
        if start is not None:
            self.send_header("Content-Range", f"bytes {start + site.shift}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        cut = site.cuts.pop(0) if site.cuts else None
        with suppress(ConnectionError):  # whoever has enough leaves
            self.wfile.write(body[:cut])
        if cut is not None:
            self.wfile.flush()
            time.sleep(site.stall)


@contextmanager
def serving() -> Iterator[Site]:
    """A running server, gone afterwards."""
    site = Site()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"site": site}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
