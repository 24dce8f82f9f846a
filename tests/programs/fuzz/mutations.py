"""Changes of a file: of its bytes, of the values in its structure, of what lies in its place."""

from __future__ import annotations

import bz2
import copy
import gzip
import io
import json
import lzma
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

_DEEP, _LONG = "@deep@", "@long@"
"""Placeholders of what ``json.dumps`` cannot write."""
_RAW = {
    _DEEP: ("[" * 50_000 + "]" * 50_000, '{"a":' * 50_000 + "0" + "}" * 50_000),
    _LONG: ("9" * 10_000, "-" + "9" * 400, "1e999", "1" + "0" * 300 + ".5"),
}
_NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**18, 10**30),
    *(0.5, -0.0, 1e308, 1e18, float("nan"), float("inf"), float("-inf")),
    *("", "x", "0", "0" * 32, "\ud800", "\udfff", "\0", "\n", "\x1b[31m", "é" * 10, "a" * 100_000),
    *("../../../etc/passwd", "/etc/passwd", "/dev/zero", "..", ".", "file:///etc/passwd", "step-0000000005/COMMITTED"),
    *("memory://x", "reference://::file:///x", "http://127.0.0.1:1/x", "s3://", "NaN", "TRUE", "2026-11-21T08:22:00Z"),
    *([], {}, [[]], [None], {"": None}, {"a": {"b": 1}}, [0] * 1000, [1, "a", None], {"format": 1}),
    *(_DEEP, _LONG),
)
_YAML = (
    b"a: &a [x,x,x,x,x,x,x,x,x]\n"
    + b"".join(
        b"%c: &%c [*%c,*%c,*%c,*%c,*%c,*%c,*%c,*%c]\n" % (c, c, *[c - 1] * 8) for c in range(ord("b"), ord("k"))
    ),
    b'run: !!python/object/apply:os.system ["exit 1"]\n',
    b"[" * 5000,
    b"{a: " * 3000,
    b"run: &a [*a]\n",
    b"run: {id: &x abc, root: *x}\n",
    b"? [a]\n: b\n",
    b"run: 2001-01-01\n",
    b"run: !!binary YWJj\n",
    b"<<: {a: 1}\n",
    b"\xff\xfe",
    b"%YAML 9.9\n---\n",
    b"--- a\n--- b\n",
    b"\t",
    b"run: {id: 0x7f, root: 1:30}\n",
)
SPARSE_BYTES = 2**36
_BOMB_MIB = 300


def change_bytes(random: Random, data: bytes) -> bytes:
    """Return ``data`` with flipped, cut, swapped, repeated, zeroed or inserted bytes."""
    place, other = random.randrange(len(data) + 1), random.randrange(len(data) + 1)
    begin, end = min(place, other), max(place, other)
    match random.randrange(9):
        case 0 | 1 if data:
            found = bytearray(data)
            for _ in range(random.choice((1, 1, 1, 2, 8))):
                found[random.randrange(len(found))] ^= 1 << random.randrange(8)
            return bytes(found)
        case 2:
            return data[:place]
        case 3:
            return data[:begin] + data[end:]
        case 4:
            return data[:begin] + bytes(min(end - begin, 4096)) + data[end:]
        case 5:
            return data[:begin] + data[begin:end][:20_000] * random.choice((2, 3)) + data[end:]
        case 6:
            middle = (begin + end) // 2
            return data[:begin] + data[middle:end] + data[begin:middle] + data[end:]
        case 7:
            return data[:place] + random.randbytes(random.choice((1, 4, 100))) + data[place:]
    return random.choice((b"", b"\n", b"null", b"[]", b"{}", b'""', b"0", bytes(512), b"\xff" * 40, b"[" * 100_000))


def nudge(random: Random, value: Any) -> Any:
    """Return a JSON value with one or two of its whole numbers a little larger or smaller: rot that may still fit."""
    root = [json.loads(json.dumps(value))]
    places = list(_whole_numbers(root))
    for holder, key in random.sample(places, min(len(places), random.choice((1, 1, 2)))):
        holder[key] = max(0, holder[key] + random.choice((-4, -2, -1, 1, 2, 4, -8, 8)))
    return root[0]


def _whole_numbers(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        if type(inner) is int:
            yield value, key
        yield from _whole_numbers(inner)


def change_value(random: Random, value: Any) -> Any:
    """Return a JSON value with one to three changes somewhere in it."""
    root = [json.loads(json.dumps(value))]
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        if random.random() < 0.2:
            _take_a_siblings(random, root)
        else:
            _change_at(random, *_place(random, root)[-1])
    return root[0]


def _take_a_siblings(random: Random, root: list[Any]) -> None:
    """Replace a value by the one that has its place in a sibling of one of its containers."""
    path = _place(random, root)
    holder, key = random.choice(path)
    other = random.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    value = holder[other]
    target, place = path[-1]
    for inner, at in path[path.index((holder, key)) + 1 :]:
        try:
            value = value[at]
        except (LookupError, TypeError):
            return
        target, place = inner, at
    target[place] = json.loads(json.dumps(value))


def _place(random: Random, root: list[Any]) -> list[tuple[Any, Any]]:
    """Return the path to a value in ``root``: containers, and the keys in them. Every depth is as likely."""
    path: list[tuple[Any, Any]] = [(root, 0)]
    for _ in range(random.choice((0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 8))):
        holder, key = path[-1]
        inner = holder[key]
        if not isinstance(inner, dict | list) or not inner:
            break
        path.append((inner, random.choice(list(inner)) if isinstance(inner, dict) else random.randrange(len(inner))))
    return path


def _change_at(random: Random, holder: Any, key: Any) -> None:
    old = holder[key]
    match random.randrange(10):
        case 0:
            del holder[key]
            if isinstance(holder, list) and not holder:
                holder.append(None)
        case 1 if isinstance(holder, dict):
            holder[random.choice(("unknown", "", "format", "\ud800", "kind", "__class__", "self"))] = old
        case 1:
            holder.insert(key, old)
        case 2 if isinstance(holder, dict):
            holder[random.choice(list(holder))] = old
        case 2:
            other = random.randrange(len(holder))
            holder[key], holder[other] = holder[other], old
        case 3 | 4 | 5 if isinstance(old, int | float):
            holder[key] = random.choice(
                (old + 1, old - 1, -old, old * 2, old // 2, old * 10**6, float(old), str(old), old + 0.5)
            )
        case 3 | 4 | 5 if isinstance(old, str):
            place = random.randrange(len(old) + 1)
            add = random.choice(("\n", "\0", "/", "../", "é", "\ud800", " ", "0", "://", "\u202e", "x" * 300))
            holder[key] = random.choice(
                (old[:place] + add + old[place:], old[:place], old.upper(), old * 2, [old], add + old)
            )
        case 6 if isinstance(old, dict | list):
            holder[key] = random.choice((list(old), dict.fromkeys(map(str, old)), [old], [*old, *old], {"a": old}))
        case _:
            holder[key] = copy.deepcopy(random.choice(_NASTY))  # later changes may change it


def dumped(random: Random, value: Any) -> bytes:
    """Return a JSON value as bytes, with what ``json.dumps`` cannot write."""
    text = json.dumps(value)
    for mark, texts in _RAW.items():
        text = text.replace(f'"{mark}"', random.choice(texts))
    return text.encode()


def change_json(random: Random, data: bytes) -> bytes:
    """Change values of a JSON file, or its bytes."""
    match random.randrange(8):
        case 0 | 1:
            return change_bytes(random, data)
        case 2 | 3:
            return json.dumps(nudge(random, json.loads(data))).encode()
    return dumped(random, change_value(random, json.loads(data)))


def change_lines(random: Random, data: bytes) -> bytes:
    """Change some lines of JSON, the order of lines, or bytes."""
    lines = data.splitlines(keepends=True)
    if random.random() < 0.2 or not lines:
        return change_bytes(random, data)
    for _ in range(random.choice((1, 1, 2, 5))):
        at = random.randrange(len(lines))
        match random.randrange(7):
            case 0:
                lines.insert(at, lines.pop(random.randrange(len(lines))))
            case 1:
                lines.insert(at, lines[at])
            case 2:
                lines[at] = change_bytes(random, lines[at]) + b"\n"
            case 3:
                lines[at] = random.choice((b"\n", bytes(200) + b"\n", b"\xff\n", lines[at][:4000] * 200))
            case _:
                try:
                    lines[at] = dumped(random, change_value(random, json.loads(lines[at]))) + b"\n"
                except (ValueError, RecursionError):  # of an earlier change of this line
                    lines[at] = change_bytes(random, lines[at])
    return b"".join(lines)


def change_yaml(random: Random, data: bytes) -> bytes:
    match random.randrange(8):
        case 0:
            return change_bytes(random, data)
        case 1:
            return random.choice(_YAML)
        case 2:
            place = random.randrange(len(data))
            return data[:place] + random.choice(_YAML)[:5000] + data[place:]
        case 3:
            return data + random.choice(_YAML)[:5000]
    value = change_value(random, yaml.safe_load(data))
    return dumped(random, value) if random.random() < 0.5 else yaml.safe_dump(value, sort_keys=False).encode()


def change_text(random: Random, data: bytes) -> bytes:
    value = data.decode("utf-8", "replace")
    return (
        change_bytes(random, data)
        if random.random() < 0.6
        else str(random.choice((*_NASTY, value * 3))).encode("utf-8", "replace")
    )


def _inside(unpack: Callable[[bytes], bytes], pack: Callable[[bytes], bytes]) -> Callable[[Random, bytes], bytes]:
    def change(random: Random, data: bytes) -> bytes:
        match random.randrange(12):
            case 0:  # a bomb: hundreds of MiB in a few kilobytes
                line = random.choice((b"\0", b"a", b"[", b'{"text": "a"}\n'))
                return _bomb(pack, (line * 2**20)[: 2**20])
            case 1:
                return data + data
            case 2 | 3 | 4 | 5 | 6:
                return pack(change_lines(random, unpack(data)))
        return change_bytes(random, data)

    return change


_BOMBS: dict[tuple[Any, bytes], bytes] = {}


def _bomb(pack: Callable[[bytes], bytes], part: bytes) -> bytes:
    """Return a bomb of ``part``, packed as members that follow each other: made once, in little memory."""
    key = (pack, part[:16])
    if key not in _BOMBS:
        _BOMBS[key] = pack(part) * _BOMB_MIB
    return _BOMBS[key]


def zst(data: bytes) -> bytes:
    """Return ``data`` as one frame of Zstandard."""
    return bytes(pa.Codec("zstd").compress(data, asbytes=True))


def _unzst(data: bytes) -> bytes:
    return pa.CompressedInputStream(pa.BufferReader(data), "zstd").read()


def change_parquet(random: Random, data: bytes) -> bytes:
    """Change its footer, its pages, or write another table."""
    match random.randrange(6):
        case 0:
            return change_bytes(random, data)
        case 1 | 2:
            footer = 8 + int.from_bytes(data[-8:-4], "little")
            found = bytearray(data)
            for _ in range(random.choice((1, 1, 2, 8))):
                found[-random.randrange(1, footer + 1)] ^= 1 << random.randrange(8)
            return bytes(found)
        case 3:
            footer = 8 + int.from_bytes(data[-8:-4], "little")
            return change_bytes(random, data[:-footer]) + data[-footer:]
        case 4:
            return data[:-8] + random.choice((0, 1, 2**31 - 1, 2**32 - 1, len(data))).to_bytes(4, "little") + data[-4:]
    return _other_table(random)


def change_safetensors(random: Random, data: bytes) -> bytes:
    """Change values of its header, the length of that, or bytes of the file."""
    begin = 8 + int.from_bytes(data[:8], "little")
    match random.randrange(6):
        case 0:
            return change_bytes(random, data)
        case 1:
            length = random.choice((0, 1, begin, len(data), 2**31, 2**63, 2**64 - 1))
            return length.to_bytes(8, "little") + data[8:]
        case 2:
            return data[:begin] + change_bytes(random, data[begin:])
        case 3:
            header = json.dumps(nudge(random, json.loads(data[8:begin]))).encode()
        case _:
            header = dumped(random, change_value(random, json.loads(data[8:begin])))
    return len(header).to_bytes(8, "little") + header + data[begin:]


def _other_table(random: Random) -> bytes:
    bad = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")])
    column = random.choice(
        (
            pa.array([1, 2, None]),
            pa.array([None, None]),
            pa.array([["a"], []]),
            pa.array([{"a": 1}]),
            pa.array([b"\xff\0", None]),
            pa.array(["a" * 200_000] * 50),
            pa.array(["a"] * 5000).dictionary_encode(),
            pa.array([], pa.string()),
            pa.array(["x" * 2**20] * 1).dictionary_encode().take(pa.array([0] * 3000)),
            bad,
        )
    )
    name = random.choice(("text", "text", "text", "other", ""))
    out = io.BytesIO()
    pq.write_table(pa.table({name: column}), out, compression=random.choice(("zstd", "none", "snappy")))
    return out.getvalue()


CHANGES: dict[str, Callable[[Random, bytes], bytes]] = {
    "bytes": change_bytes,
    "json": change_json,
    "lines": change_lines,
    "yaml": change_yaml,
    "text": change_text,
    "gzip": _inside(gzip.decompress, lambda data: gzip.compress(data, 1)),
    "xz": _inside(lzma.decompress, lambda data: lzma.compress(data, preset=0)),
    "bzip2": _inside(bz2.decompress, lambda data: bz2.compress(data, 1)),
    "zstd": _inside(_unzst, zst),
    "parquet": change_parquet,
    "safetensors": change_safetensors,
}
"""Kind of a file -> how it is changed."""

PLACES = ("gone", "folder", "loop", "zeros", "fifo", "elsewhere", "sparse", "dangling")
"""What may lie in the place of a file."""


def change_place(random: Random, path: Path, places: Sequence[str]) -> str:
    """Put one of ``places`` in the place of a file; returns which."""
    what = random.choice(places)
    if what == "sparse":  # 64 GiB that take no space
        os.truncate(path, SPARSE_BYTES)
        return what
    path.unlink()
    match what:
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path)
        case "zeros":
            path.symlink_to("/dev/zero")
        case "fifo":
            os.mkfifo(path)
        case "elsewhere":
            path.symlink_to("/etc/passwd")
        case "dangling":
            path.symlink_to("/nowhere/at/all")
    return what
