"""How files look in a listing, and that a later listing tells which are others."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import pytest

from springtide.corpus import changed_files, open_source
from springtide.corpus.files import look_of
from springtide.storage import Folder

NOON = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("info", "change"),
    [
        ({"mtime": 0.0, "created": 5.0}, "0.0"),
        ({"ETag": '"5d41"', "LastModified": NOON}, '"5d41"'),
        ({"etag": "0x8D", "last_modified": NOON}, "0x8D"),
        ({"etag": None, "last_modified": NOON}, str(NOON)),
        ({"Last-Modified": "Thu, 01 Jan 2026 12:00:00 GMT"}, "Thu, 01 Jan 2026 12:00:00 GMT"),
        ({"created": 5.0}, "5.0"),
        ({"ETag": ""}, None),
        ({}, None),
    ],
)
def test_what_changes_with_a_file_is_found_in_what_each_store_tells(info: dict[str, Any], change: str | None) -> None:
    look = look_of({"size": 0, **info})
    assert (look and look.change) == change
    assert look_of({"size": None, **info}) is None


def test_a_rewritten_file_in_memory_makes_another_source() -> None:
    folder = Folder("memory://looks")
    folder.write("a.txt", "one")
    before = open_source(folder.url).fingerprint()
    assert open_source(folder.url).fingerprint() == before
    folder.write("a.txt", "two")
    assert open_source(folder.url).fingerprint() != before
    folder.remove()


@pytest.mark.parametrize("pattern", ["", "/*.txt", "/b.txt"])
def test_files_that_were_rewritten_or_removed_are_found_by_another_look(tmp_path: Path, pattern: str) -> None:
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / name).write_text("text")
    source = f"{tmp_path}{pattern}"
    seen = open_source(source).seen
    assert changed_files(source, seen) == []
    (tmp_path / "d.txt").write_text("one more changes none of them")
    assert changed_files(source, seen) == []
    os.utime(tmp_path / "b.txt", (1, 1))
    assert changed_files(source, seen) == ["b.txt"]
    if "b.txt" not in pattern:
        (tmp_path / "a.txt").unlink()
        assert changed_files(source, seen) == ["a.txt", "b.txt"]
    assert changed_files("stdlib", open_source("stdlib", 3).seen) == []
