"""A JSON line takes a bounded multiple of its size; what would take more is dropped by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from springtide.corpus import Broken, Document, json_records, open_source

pytestmark = pytest.mark.processes

_PEAK = """
import json, re, sys
from springtide.corpus import open_source
def peak():  # of this program: getrusage counts what was there before it, too
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
source = open_source(sys.argv[1])
before = peak()
found = []
for one in source.units():
    for item in source.read(one):
        found.append([type(item).__name__, getattr(item, "reason", ""), len(getattr(item, "text", ""))])
        del item
print(json.dumps([peak() - before, found]))
"""
MIB = 2**20


def repeated(part: str, size: int, before: str, after: str) -> str:
    return before + part * ((size - len(before) - len(after)) // len(part)) + after + "\n"


LINES = {
    "objects": repeated("{},", 20 * MIB, '{"text": [', "{}]}"),
    "keys": "{" + ",".join(f'"{number:x}":0' for number in range(1_500_000)) + " " * 2 * MIB + "}\n",
    "lists in a string": repeated("[],{},", 20 * MIB, '{"text": "', '"}'),
    "escapes and an emoji": repeated("ab\\n", 20 * MIB, '{"text": "', '\U0001f986"}'),
    "numbers": repeated("1234,", 20 * MIB, '{"text": [', "1]}"),
    "a number": repeated("9", 20 * MIB, '{"text": ', "}"),
    "depth": repeated("[", 20 * MIB, '{"text": ', "}"),
}


@pytest.mark.parametrize("name", ["objects", "keys", "numbers", "a number", "depth"])
def test_a_long_line_of_many_values_is_dropped_by_name(name: str, tmp_path: Path) -> None:
    found, peak = read(tmp_path, LINES[name])
    assert [kind for kind, *_ in found] == ["Broken", "Document"]
    assert found[0][1] == "longer than 16,777,216 bytes and not UTF-8 JSON of at most 524,288 values"
    assert peak < 8 * len(LINES[name])


@pytest.mark.parametrize("name", ["lists in a string", "escapes and an emoji"])
def test_a_long_line_of_one_text_is_read_in_little_memory(name: str, tmp_path: Path) -> None:
    found, peak = read(tmp_path, LINES[name])
    assert found == [["Document", "", len(json.loads(LINES[name])["text"])], ["Document", "", 5]]
    assert peak < 8 * len(LINES[name].encode())


def read(tmp_path: Path, line: str) -> tuple[list[Any], int]:
    """Return what a process found in a line and one after it, and how much its memory grew [bytes]."""
    (tmp_path / "a.jsonl").write_text(line + '{"text": "after"}\n')
    done = subprocess.run([sys.executable, "-c", _PEAK, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    peak, found = json.loads(done.stdout)
    return found, peak


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ('{"text": "%s"}', True),
        ('{"text": "%s", "a": [1, {"b": NaN}], "text": "last \\ud83e\\udd86"}', True),
        (' {"text": "%s"} \t', True),
        ('{"text": "%s", "a": [1, 2, 3, 4, 5, 6, 7, 8]}', False),
        ('{"text": "%s", "a": "\\ud83e"}', False),
        ('{"text": "%s", "a": "\udcff"}', False),
        ('{"text": "%s"', False),
    ],
)
def test_a_long_line_is_the_same_document_or_counted(
    line: str, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = line.replace("%s", "x" * 200)
    (tmp_path / "a.jsonl").write_bytes((text + '\n{"text": "after"}\n').encode("utf-8", "surrogateescape"))
    source = open_source(str(tmp_path))
    [unit] = source.units()
    expected = list(source.read(unit))
    monkeypatch.setattr(json_records, "_SHORT_BYTES", 100)
    monkeypatch.setattr(json_records, "_MOST_VALUES", 8)
    found = list(source.read(unit))
    assert found[1] == expected[1]
    if kept:
        assert found == expected
        assert isinstance(found[0], Document)
    else:
        assert isinstance(found[0], Broken)
        assert found[0].reason == "longer than 100 bytes and not UTF-8 JSON of at most 8 values"
        assert found[0].sample == text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")[:200]
