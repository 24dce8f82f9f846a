"""A corpus behind a password and a signature: neither is in the dataset, its card, what is said of it, or what goes wrong."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from springtide import config as configs
from springtide.cli.main import main

pytest.importorskip("aiohttp")

SECRET = "hunter2"


class _Texts(http.server.BaseHTTPRequestHandler):
    """Serves texts to whoever has the signature: some records are broken, some files do not exist."""

    def do_GET(self) -> None:
        name, _, query = self.path.partition("?")
        lines = [json.dumps({"text": f"line {n} of the sea, and {n * n} of the fog"}) for n in range(400)]
        body = "\n".join([*lines, "{broken", ""]).encode()
        found = name == "/texts" and query == f"X-Amz-Signature={SECRET}&name=texts.jsonl"
        self.send_response(200 if found else 403)
        self.send_header("Content-Length", str(len(body) if found else 0))
        self.end_headers()
        if found and self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Texts) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"u:{SECRET}@127.0.0.1:{running.server_address[1]}"
        running.shutdown()


def test_neither_is_in_anything_that_a_prepare_makes_or_says(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "datasets"
    options = [
        "--recipe",
        "tiny",
        "--shards.root",
        str(root),
        "--corpus.vocab-size",
        "300",
        "--corpus.min_characters",
        "1",
    ]
    source = f"http://{server}/texts?X-Amz-Signature={SECRET}&name=texts.jsonl"
    saved = tmp_path / "saved.yaml"
    assert main(["data", "prepare", *options, "--corpus.source", source, "--save", str(saved)]) == 0, (
        capsys.readouterr()
    )
    assert configs.load_config(saved).corpus.source == source
    assert saved.stat().st_mode & 0o777 == 0o600
    [dataset] = (path.parent for path in root.rglob("manifest.json"))
    assert "***" in json.loads((dataset / "manifest.json").read_text())["source"]["source"]
    assert main(["inspect", str(dataset)]) == 0
    again = source.replace(f"u:{SECRET}@", "u:another@")
    assert main(["data", "prepare", *options, "--corpus.source", again]) == 0
    assert len(list(root.rglob("manifest.json"))) == 1, "who may read it does not change what is read"
    for wrong in (f"http://{server}/none.jsonl?sig={SECRET}", source.replace("http:", "ftp:"), f"{source}&x=1"):
        assert main(["data", "prepare", *options, "--corpus.source", wrong]) == 2
    said = "".join(capsys.readouterr()) + caplog.text
    assert "***" in said
    assert SECRET not in said
    names = sorted(path.name for path in root.rglob("*"))
    assert "card.html" in names
    assert not [path for path in root.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert not [name for name in names if SECRET in name]
