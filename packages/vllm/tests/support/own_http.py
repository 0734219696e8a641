"""The HTTP server of an engine: what it is asked waits until a test lets it go on.

::

    with serving() as server:
        ...  # something asks server.url
        asked = server.asked.get(timeout=60)
        asked.done.set()  # or server.free.set(), for all
"""

from __future__ import annotations

import contextlib
import json
import queue
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Asked:
    """A request."""

    path: str
    key: str | None  # the header of an API key
    body: dict[str, Any]
    done: threading.Event = field(default_factory=threading.Event)
    gone: bool = False  # the client has


class OwnHTTP(ThreadingHTTPServer):
    """Answers each request with a status, once it may."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, status: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = status
        self.asked: queue.SimpleQueue[Asked] = queue.SimpleQueue()
        self.free = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: OwnHTTP

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        asked = Asked(self.path, self.headers.get("authorization"), body)
        self.server.asked.put(asked)
        while not (self.server.free.is_set() or asked.done.wait(0.002)):
            if select.select([self.connection], [], [], 0)[0]:
                asked.gone = True
                return
        with contextlib.suppress(OSError):
            self.send_response(self.server.status)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

    def log_message(self, *_: Any) -> None:
        """Write no line for each request."""


@contextmanager
def serving(status: int = 200) -> Iterator[OwnHTTP]:
    with OwnHTTP(status) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.free.set()
            server.shutdown()
            thread.join()
