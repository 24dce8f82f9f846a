"""A stand-in for the Hugging Face Hub: the few requests of its fsspec file system for one repository, from a local folder.

Paths and fields are those of the Hub's HTTP API (huggingface.co/docs/hub/api); commits, large files and limits are not there.
"""

from __future__ import annotations

import hashlib
import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """Answers for ``REPOSITORY``, of a dataset or a model, whose files lie in ``root``; other repositories are not found."""

    root: Path
    token = ""
    """If set, requests without it are refused."""
    requests: ClassVar[list[str]] = []
    REPOSITORY = "someone/texts"
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        self.requests.append(f"{self.command} {path}")
        if not self._allowed():
            return
        kind = "datasets" if "/datasets/" in path else "models"
        api, files = (
            f"/api/{kind}/{self.REPOSITORY}",
            f"{'/datasets' * (kind == 'datasets')}/{self.REPOSITORY}/resolve/",
        )
        if path.startswith(f"{api}/tree/"):
            folder = path.removeprefix(f"{api}/tree/").partition("/")[2]
            recursive = parse_qs(url.query).get("recursive", ["false"])[0].lower() == "true"
            base = self.root / folder
            found = sorted(base.rglob("*") if recursive else base.glob("*")) if base.is_dir() else []
            self._answer(json.dumps([self._entry(one) for one in found]).encode())
        elif path.startswith(files):
            self._file(path.removeprefix(files).partition("/")[2])
        elif path in (f"{api}{end}" for end in ("", "/revision/main", f"/revision/{COMMIT}")):
            self._answer(json.dumps({"id": self.REPOSITORY, "sha": COMMIT, "siblings": []}).encode())
        else:
            self._refuse(404, "RepoNotFound")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.requests.append(f"POST {self.path}")
        if not self._allowed():
            return
        paths = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode())["paths"]
        found = [self._entry(self.root / one) for one in paths if (self.root / one).exists()]
        self._answer(json.dumps(found).encode())

    def _allowed(self) -> bool:
        if self.token and self.headers.get("Authorization") != f"Bearer {self.token}":
            self._refuse(401, "GatedRepo")
            return False
        if self.REPOSITORY not in self.path:
            self._refuse(404, "RepoNotFound")
            return False
        return True

    def _entry(self, path: Path) -> dict[str, Any]:
        name = path.relative_to(self.root).as_posix()
        if path.is_dir():
            return {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
        data = path.read_bytes()
        return {"type": "file", "oid": hashlib.sha1(data).hexdigest(), "size": len(data), "path": name}

    def _file(self, name: str) -> None:
        path = self.root / name
        if not path.is_file():
            self._refuse(404, "EntryNotFound")
            return
        data, status = path.read_bytes(), 200
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if given := self.headers.get("Range"):
            first, _, last = given.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last or len(data) - 1), len(data) - 1)
            headers["Content-Range"] = f"bytes {begin}-{end}/{len(data)}"
            data, status = data[begin : end + 1], 206
        self._answer(data, status, headers)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(b'{"error": "refused"}', status, {"X-Error-Code": code})

    def _answer(self, data: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
