"""Read untrusted headers of safetensors files, and the index file of a model that is split into several files; write headers.

    8 bytes of length | JSON: name -> dtype, shape, data_offsets | the bytes of the tensors, without gaps

Format: github.com/huggingface/safetensors. No tensor data of a file is read before the whole header is checked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from springtide.checkpoint.validate import ITEM_BYTES
from springtide.errors import ConfigError, explain
from springtide.hf.hf_files import COPY, check_values, parsed, read_file
from springtide.storage import Folder, to_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MOST_TENSORS = 100_000
"""Largest number of tensors that a file or an index may list."""
_MOST_HEADER_BYTES = 10_000_000
"""Largest size of a header in bytes: 100 bytes for each of 100,000 tensors. The reference implementation allows ten times as
much."""
_VALUES_OF_A_TENSOR = 16
"""Upper limit for the number of JSON values that describe one tensor in a header: the type, up to 8 sizes, two offsets, two
lists, and the object that contains them."""
_MOST_INDEX_BYTES, _MORE_VALUES = 16 * 2**20, 100
"""Largest size of an index in bytes, and most JSON values in it besides one entry per tensor. An index of 100,000 tensors has
10 MB."""
_MOST_FILES = 10_000
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_SHOWN = 5


class Stored(NamedTuple):
    """Where and how a tensor is stored in a safetensors file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Offset of the tensor's data from the start of the file [bytes]."""
    size_bytes: int


class Entry(NamedTuple):
    """Name, type and shape of a tensor to write to a safetensors file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Size of the tensor's data in a file [bytes]."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def read_tensors(folder: Folder) -> dict[str, Stored]:
    """Find the tensors of a model's folder. Reads its index and the headers of all listed files, or the header of its only
    file. Returns name -> where the tensor is stored.

    Raises:
        ConfigError: there are no tensors, only pickled ones, or a header or the index is not valid.
    """
    names = folder.names()
    if INDEX in names:
        return _by_index(folder, names)
    if SINGLE in names:
        return read_header(folder, SINGLE)
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        remedy = (
            "where you trust them, load the model by transformers and save it again: "
            'AutoModelForCausalLM.from_pretrained(FOLDER, weights_only=True).save_pretrained("FOLDER-safe")'
        )
        raise ConfigError(explain(folder.where(pickles[0]), pickles, "are pickles, which run code when read", remedy))
    remedy = f"give a folder with {SINGLE}, or with {INDEX} and its files"
    raise ConfigError(explain("folder", folder.url, "has no safetensors files", remedy))


def _by_index(folder: Folder, names: Iterable[str]) -> dict[str, Stored]:
    where = folder.where(INDEX)
    data = read_file(folder, INDEX, _MOST_INDEX_BYTES)
    check_values(data, where, _MOST_TENSORS + _MORE_VALUES)
    index = parsed(data, where)
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ConfigError(explain(f"{where}: weight_map", places, "is not a table of files by tensor", COPY))
    for tensor, file in places.items():
        if not isinstance(file, str) or not _FILE.fullmatch(file):
            problem = f"is not the name of a safetensors file in this folder (of {tensor[:100]})"
            raise ConfigError(explain(f"{where}: weight_map", file, problem, COPY))
    files = sorted(set(places.values()))
    if len(files) > _MOST_FILES:
        raise ConfigError(explain(where, len(files), f"are more than {_MOST_FILES} files", COPY))
    missing = [file for file in files if file not in set(names)]
    if missing:
        problem = f"names {missing[0]} and the folder has no such file"
        raise ConfigError(explain(where, missing[:_SHOWN], problem, "download the missing files"))
    if SINGLE in names and files != [SINGLE]:
        problem = f"names {files[0]}, and transformers would read {SINGLE}, which is there, too"
        raise ConfigError(explain(where, files[:_SHOWN], problem, f"remove {SINGLE}, or this index"))
    found: dict[str, Stored] = {}
    for file in files:
        for tensor, stored in read_header(folder, file).items():
            if places.get(tensor) != file:
                said = f"is in {file}, and the index has it in {places.get(tensor) or 'no file'}"
                raise ConfigError(explain(where, tensor, said, COPY))
            found[tensor] = stored
    absent = sorted(places.keys() - found.keys())
    if absent:
        problem = f"is not in {places[absent[0]]}, where the index has it"
        raise ConfigError(explain(where, absent[:_SHOWN], problem, COPY))
    return found


def read_header(folder: Folder, name: str) -> dict[str, Stored]:
    """Return the tensors of the file ``name``: name -> where the tensor is stored. Raises ConfigError if the header is too
    large or has an invalid type or shape, or if offsets overlap, leave gaps, or do not end at the end of the file."""
    where, size = folder.where(name), folder.size(name)
    length = int.from_bytes(bytes(folder.read_range(name, 0, 8)), "little")
    if size < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
        limit = f"is more than the {max(0, size - 8)} bytes that follow it, or the limit of {_MOST_HEADER_BYTES}"
        raise ConfigError(explain(f"{where}: length of the header", length, limit, COPY))
    text = bytes(folder.read_range(name, 8, 8 + length))
    check_values(text, where, _VALUES_OF_A_TENSOR * _MOST_TENSORS)
    header = parsed(text, where)
    header.pop("__metadata__", None)
    if len(header) > _MOST_TENSORS:
        raise ConfigError(explain(where, len(header), f"are more than {_MOST_TENSORS:,} tensors", COPY))
    data = 8 + length
    found = {tensor: _stored(name, data, tensor, facts, where) for tensor, facts in header.items()}
    end, before = data, ""
    for tensor, one in sorted(found.items(), key=lambda item: (item[1].begin, item[1].size_bytes)):
        if one.begin != end:
            kind = "overlaps" if one.begin < end else "leaves a gap after"
            raise ConfigError(
                explain(f"{where}: {tensor[:200]}", one.begin - data, f"{kind} {before or 'the header'}", COPY)
            )
        end, before = one.begin + one.size_bytes, tensor[:200]
    if end != size:
        raise ConfigError(explain(where, size, f"is not the {end} bytes that its header describes", COPY))
    return found


def _stored(file: str, data: int, tensor: str, facts: Any, where: str) -> Stored:
    named = f"{where}: {tensor[:200]}"
    if not isinstance(facts, dict):
        raise ConfigError(explain(named, facts, "does not describe a tensor", COPY))
    dtype: Any = facts.get("dtype")
    shape: Any = facts.get("shape")
    offsets: Any = facts.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ConfigError(explain(f"{named}: dtype", dtype, f"is not one of {', '.join(ITEM_BYTES)}", COPY))
    if not _counts(shape) or len(shape) > 8:
        raise ConfigError(explain(f"{named}: shape", shape, "is not a list of up to 8 sizes", COPY))
    if not _counts(offsets) or len(offsets) != 2:
        raise ConfigError(explain(f"{named}: data_offsets", offsets, "is not a begin and an end", COPY))
    size = math.prod(shape) * ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != size:
        problem = f"is not the {size} bytes of {dtype} {shape}"
        raise ConfigError(explain(f"{named}: data_offsets", offsets, problem, COPY))
    return Stored(file, dtype, tuple(shape), data + offsets[0], size)


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(one) is int and 0 <= one < 2**48 for one in values)


def header_of(entries: Iterable[Entry], metadata: Mapping[str, str]) -> bytes:
    """Return the first bytes of a file with the tensors ``entries``, in the given order: the length of the header, and the
    header."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    begin = 0
    for one in entries:
        offsets = [begin, begin + one.size_bytes]
        header[one.name] = {"dtype": one.dtype, "shape": one.shape, "data_offsets": offsets}
        begin = offsets[1]
    text = to_json(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
