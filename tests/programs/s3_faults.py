"""A proxy before a real S3 server that misbehaves when told to: SlowDown, dropped connections, slowness, lost permission."""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


class Faults:
    """What the proxy does with requests, told while it runs. ``methods`` are those that suffer."""

    def __init__(self) -> None:
        self.kind = ""
        """``slowdown``, ``reset``, ``deny``, ``slow``, or nothing."""
        self.methods = ("PUT", "POST")
        self.only = ""
        """Requests whose path has this in it; all when empty."""
        self.left = 0
        """Requests that will suffer; negative for all."""
        self.suffered = 0
        self.seen = threading.Event()
        """Set when one did."""
        self._lock = threading.Lock()

    def set(self, kind: str, left: int = -1, methods: tuple[str, ...] = ("PUT", "POST")) -> None:
        """Misbehave from now on."""
        with self._lock:
            self.kind, self.left, self.methods, self.suffered = kind, left, methods, 0
            self.seen.clear()

    def next(self, method: str, path: str) -> str:
        """What becomes of the next request."""
        with self._lock:
            if not self.kind or self.left == 0 or method not in self.methods or self.only not in path:
                return ""
            self.left -= 1
            self.suffered += 1
            self.seen.set()
            return self.kind


def _answer(status: int, code: str) -> bytes:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>by the proxy</Message></Error>".encode()
    head = f"HTTP/1.1 {status} {code}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def _serve(self) -> None:
        fault = self.server.faults.next(self.command, self.path)
        length = int(self.headers.get("Content-Length") or 0)
        if fault == "reset":
            self.rfile.read(length // 2)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return
        body = self.rfile.read(length)
        if fault in ("slowdown", "deny"):
            self.wfile.write(_answer(503, "SlowDown") if fault == "slowdown" else _answer(403, "AccessDenied"))
            return
        if fault == "slow":
            time.sleep(1.0 + length / 4e6)  # what a line of 4 MB/s takes, and a second on top
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=60)
        try:
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                upstream.putheader(name, value)
            upstream.endheaders(body if body else None)
            answer = upstream.getresponse()
            data = answer.read()
        except OSError:
            self.close_connection = True
            return
        finally:
            upstream.close()
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection") and (
                name.lower() != "content-length" or self.command == "HEAD"
            ):
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # the client went away


@contextlib.contextmanager
def proxy(upstream: str) -> Iterator[tuple[str, Faults]]:
    """The URL of a proxy before the server at ``upstream``, and its faults."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.upstream = urlsplit(upstream).netloc  # type: ignore[attr-defined]
    server.faults = Faults()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", server.faults  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
