"""Metadata services of clouds on loopback, as instances see them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Metadata:
    """What the service says, by path; a path that is not there is 404. While ``go_on`` is cleared it says nothing."""

    def __init__(self) -> None:
        self.answers: dict[str, str] = {}
        self.headers: dict[str, tuple[str, str]] = {}
        """By path: a header that must be sent; else 401."""
        self.asked: list[str] = []
        self.status: dict[str, int] = {}
        self.go_on = threading.Event()
        self.go_on.set()
        self.url = ""
        self.date: str | None = None
        """The time of its answers; None: this machine's."""


@contextlib.contextmanager
def metadata() -> Iterator[Metadata]:
    """A service, until the block ends."""
    state = Metadata()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            state.asked.append(f"{self.command} {path}")
            state.go_on.wait()
            name, value = state.headers.get(path, ("Host", self.headers["Host"]))
            if self.headers.get(name) != value:
                self._say(401, "")
            elif path in state.answers:
                self._say(state.status.get(path, 200), state.answers[path])
            else:
                self._say(404, "")

        do_PUT = do_GET  # noqa: N815

        def date_time_string(self, timestamp: float | None = None) -> str:
            return super().date_time_string(timestamp) if state.date is None else state.date

        def _say(self, status: int, text: str) -> None:
            body = text.encode()
            with contextlib.suppress(ConnectionError):  # who asked has given up
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield state
    finally:
        state.go_on.set()
        server.shutdown()
        thread.join()
        server.server_close()
