"""Serves a run's page to browsers on this machine, and to nobody else: loopback only, behind a token that no other page knows.

GET /TOKEN/        the page
GET /TOKEN/data    what has changed since ?have=VERSION, as JSON
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import http.server
import secrets
import urllib.parse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from springtide.errors import ConfigError, SpringtideError, explain, printable, redacted
from springtide.run.live_page import LivePage
from springtide.store import to_json

if TYPE_CHECKING:
    from springtide.run.folder import Run

HOST = "127.0.0.1"
_HERE = ("127.0.0.1", "localhost", "[::1]")
"""What a browser's Host header may name, with any port: a tunnel may end at another one."""
_TOKEN_BYTES = 24
_PATIENCE_S = 30.0
_HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",  # the rest is in the page: it holds for the file, too
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class PageServer(http.server.ThreadingHTTPServer):
    """An HTTP server of one run's page on the loopback address."""

    daemon_threads = True
    allow_reuse_address = True  # a port whose last connections still close

    def __init__(self, run: Run, port: int = 0) -> None:
        """Listen, and read nothing yet.

        Args:
            run: the run.
            port: to listen on; 0: a free one.

        Raises:
            ConfigError: the port is taken, not allowed, or not a port.
        """
        self.page, self.token = LivePage(run), secrets.token_urlsafe(_TOKEN_BYTES)
        if not 0 <= port < 2**16:
            raise ConfigError(explain("--port", port, "is not a port", "give one from 1 to 65535, or none"))
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            problem = "is taken by another program" if error.errno == errno.EADDRINUSE else f"cannot be used ({error})"
            raise ConfigError(explain("--port", port, problem, "give another one, or none for a free one")) from None

    @property
    def url(self) -> str:
        """What a browser opens."""
        return f"http://{HOST}:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a browser that went away is not an error."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout: ClassVar[float] = _PATIENCE_S
    server: PageServer

    def do_GET(self) -> None:
        """Answer with the page, with what is new in it, or with why not."""
        if not self._is_from_here():
            self._answer(403, "text/plain", "this server answers to 127.0.0.1 and localhost only")
            return
        where = urllib.parse.urlsplit(self.path)
        _, token, name = [*where.path.split("/", 2), "", ""][:3]
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._answer(403, "text/plain", "wrong token: open the address that springtide report --serve printed")
        elif name == "data":
            have = urllib.parse.parse_qs(where.query).get("have", ["0"])[-1]
            self._data(int(have) if have.isdecimal() and len(have) < 16 else 0)
        elif name == "" and where.path.endswith("/"):
            self._page()
        else:
            self._answer(404, "text/plain", "there is nothing here but the page")

    do_HEAD = do_GET  # noqa: N815

    def _refuse(self) -> None:
        self.close_connection = True  # its body is not read
        self._answer(405, "text/plain", "only GET and HEAD", {"Allow": "GET, HEAD"})

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _refuse  # noqa: N815

    def _is_from_here(self) -> bool:
        """Whether the browser was told this machine's name: a page elsewhere may have made its own name point here."""
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1:
            return False
        name, _, port = hosts[0].lower().rpartition(":") if not hosts[0].endswith("]") else (hosts[0], "", "")
        return (name or port) in _HERE

    def _page(self) -> None:
        try:
            self._answer(200, "text/html; charset=utf-8", self.server.page.html())
        except (SpringtideError, OSError, ValueError) as error:
            self._answer(503, "text/plain; charset=utf-8", _told(error))

    def _data(self, have: int) -> None:
        try:
            self._answer(200, "application/json", to_json(self.server.page.update(have)))
        except (SpringtideError, OSError, ValueError) as error:
            self._answer(503, "application/json", to_json({"problem": _told(error)}))

    def _answer(self, status: int, kind: str, body: str, headers: dict[str, str] | None = None) -> None:
        data = body.encode("utf-8", "replace")
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(data)),
            **_HEADERS,
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def version_string(self) -> str:
        return "springtide"

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: a request's line has the token."""


def _told(error: BaseException) -> str:
    return printable(redacted(str(error)))[:1000]


def serve(run: Run, port: int, say: Callable[[str], None]) -> None:
    """Serve the run's page until Ctrl-C.

    Args:
        run: the run.
        port: to listen on; 0: a free one.
        say: receives the page's URL, once the page can be opened.

    Raises:
        ConfigError: the port cannot be used, or the config is damaged.
        OSError: the store cannot be reached.
    """
    with PageServer(run, port) as server:
        server.page.update(0)  # what is wrong with the folder is said here, before a browser opens
        say(f"run {run.id}: {server.url} on this machine, until Ctrl-C")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
