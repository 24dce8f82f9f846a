"""Write a committed checkpoint as a folder that transformers loads, without a process group, a GPU, or the model in memory.

    pieces of any world size -> a few rows of one tensor at a time, verified -> model-00001-of-00002.safetensors
                                                                             -> tokenizer, README.md, index, config.json

``springtide.json`` is written first and says ``complete: false``; after all else comes ``config.json``, without which nothing
loads the folder, and then ``springtide.json`` again, with the sizes of all files [bytes].
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from springtide.checkpoint.averages import as_weights
from springtide.checkpoint.format import Manifest, Piece, checkpoints, read_manifest
from springtide.checkpoint.load import by_tensor, read_boxes, read_pieces
from springtide.checkpoint.retention import note_reader
from springtide.checkpoint.tensors import Box, raw, type_name, type_of
from springtide.checkpoint.validate import ITEM_BYTES
from springtide.checkpoint.weights_only import boxes
from springtide.config.engine import ModelConfig
from springtide.errors import CheckpointError, ConfigError, DamagedFile, explain
from springtide.interop.families import Family, Match
from springtide.interop.hf_card import card
from springtide.interop.hf_config import FILE, choose_family, written_config
from springtide.interop.hf_tokenizer import tokenizer_files
from springtide.interop.safetensors_header import INDEX, SINGLE, Entry, header_of
from springtide.store import Folder, to_json

MARKER = "springtide.json"
"""Says that a folder is an export, of what, and whether it is complete."""
SHARD_BYTES = 5 * 10**9
"""Most bytes of a file, as transformers has it, unless one tensor is larger."""
PART_BYTES = 16 * 2**20
"""Most bytes that are read or written at a time, unless one row is larger."""
_AHEAD = 2
"""Parts that are read before they are written."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Types that weights can be written in."""
_OURS = re.compile(
    r"(model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|config\.json|README\.md|tokenizer(_config)?\.json"
    r"|chat_template\.jinja)"
)


class Exported(NamedTuple):
    """A finished export."""

    url: str
    architecture: str
    checkpoint: str
    size_bytes: int
    """Size of all weights."""
    remarks: tuple[str, ...]
    """What the user should know."""


class _Source(NamedTuple):
    """The pieces of a checkpoint's weights, and the type that they are written in."""

    folder: Folder
    tensors: dict[str, list[Piece]]
    dtype: torch.dtype | None
    buffers: list[Tensor]
    """Memory to read into, in turn, uint8; empty if whoever writes may still hold a part when it asks for the next."""


def export_checkpoint(
    run: Folder,
    name: str,
    model: ModelConfig,
    to: Folder,
    facts: Mapping[str, Any],
    tokenizer: Sequence[Folder] = (),
    dtype: str = "",
    ema: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Exported:
    """Write checkpoint ``name`` of ``run`` as a folder that transformers loads.

    Args:
        model: of the config that it was saved with.
        facts: of its origin, for the model card.
        tokenizer: folders that may have its ``tokenizer.json``, recognised by its digest.
        dtype: a key of DTYPES; empty is the type that the weights are stored in.
        ema: write the averaged weights.
        shard_bytes: most bytes of a file, unless one tensor is larger.

    Raises:
        ConfigError: no architecture of transformers computes this model, or ``to`` holds what is not an export.
        CheckpointError: the checkpoint is of another model, or its bytes are bad.
        MissingAverage: it has no averaged weights.
    """
    if dtype and dtype not in DTYPES:
        raise ConfigError(explain("dtype", dtype, f"is not one of {', '.join(DTYPES)}", "omit it for the stored type"))
    family = choose_family(model)
    _check_target(to)
    with note_reader(run, name):
        manifest = read_manifest(run, name)
        pieces = read_pieces(run, name, manifest)
        found = by_tensor(as_weights(pieces) if ema else [one for one in pieces if one.tensor.startswith("model/")])
        buffers = [torch.empty(PART_BYTES, dtype=torch.uint8) for _ in range(_AHEAD + 1)] if to.is_local else []
        source = _Source(checkpoints(run), found, DTYPES.get(dtype), buffers)
        entries = _entries(source, family, model, name)
        files = _shards(list(entries), shard_bytes)
        vocab = next(iter(entries)).shape[0]
        stored = {one.dtype for one in entries}
        told, remarks = tokenizer_files(manifest.meta, tokenizer, vocab, model.max_sequence_length)
        names = str(type_of(sorted(stored)[0])).removeprefix("torch.")
        config = written_config(family, model, vocab, names, told.eos_id, told.bos_id)
        facts = {**facts, **_facts(manifest, name, family, names, ema)}
        small = {**told.files, "README.md": card(facts, told.eos_id is not None)}
        total = sum(one.size_bytes for one in entries)
        if len(files) > 1:
            places = {one.name: file for file, group in files.items() for one in group}
            small[INDEX] = to_json({"metadata": {"total_size": total}, "weight_map": places}, indent=1)
        small[FILE] = to_json(config, indent=1)
        _begin(to, facts, [*files, *small])
        written = {file: _write_file(source, to, file, group, entries) for file, group in files.items()}
    for file, text in small.items():  # config.json is the last
        to.write(file, text)
        written[file] = len(text.encode())
    to.write_json(MARKER, {**facts, "complete": True, "files": written})
    return Exported(to.url, family.architecture, name, total, tuple(remarks))


def _check_target(to: Folder) -> None:
    """Raise ConfigError if ``to`` holds files and is not an export of ours."""
    names = to.names()
    try:
        known = not names or (MARKER in names and isinstance(to.read_json(MARKER)["files"], (dict, list)))
    except (DamagedFile, KeyError, TypeError):
        known = False
    if not known:
        problem = f"holds {', '.join(names[:3])}, which no export of springtide wrote"
        raise ConfigError(explain("out", to.url, problem, "name another folder, or empty this one"))


def _begin(to: Folder, facts: Mapping[str, Any], files: Sequence[str]) -> None:
    """Say that an export is under way, and remove an earlier one, its config.json first."""
    before = set(to.names())
    to.write_json(MARKER, {**facts, "complete": False, "files": sorted(files)})
    for name in sorted((one for one in before if _OURS.fullmatch(one)), key=lambda one: one != FILE):
        to.remove(name)
    if to.is_local:
        to.sweep()


def _facts(manifest: Manifest, name: str, family: Family, dtype: str, ema: bool) -> dict[str, Any]:
    meta = manifest.meta
    found = {"checkpoint": name, "step": meta.step, "tokens": meta.tokens, "chain": meta.chain}
    found |= {"order_identity": meta.order_identity, "config_fingerprint": meta.config_fingerprint}
    found |= {"code_fingerprint": meta.code_fingerprint, "tokenizer_digest": meta.tokenizer_digest}
    return {**found, "labels": meta.labels, "architecture": family.architecture, "dtype": dtype, "averaged": ema}


def _entries(source: _Source, family: Family, model: ModelConfig, name: str) -> dict[Entry, Match]:
    """Return what is written, in order, and which of ours it is. Raises CheckpointError if the checkpoint has other tensors."""
    matches = list(family.tensors(model))
    expected = {f"model/{one}" for match in matches for one in match.ours}
    missing, extra = sorted(expected - source.tensors.keys()), sorted(source.tensors.keys() - expected)
    if missing or extra:
        told = [f"lacks {', '.join(missing[:3])}"] if missing else []
        told += [f"has {', '.join(extra[:3])}, which {family.architecture} does not"] if extra else []
        raise CheckpointError(f"{name} is of another model than its config: it {' and '.join(told)}")
    found: dict[Entry, Match] = {}
    for match in matches:
        parts = [source.tensors[f"model/{one}"][0] for one in match.ours]
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        if any(part.shape[1:] != shape[1:] for part in parts):
            raise CheckpointError(f"{name}: the tensors of {match.theirs} have different widths")
        dtype = type_name(source.dtype) if source.dtype is not None else parts[0].dtype
        found[Entry(match.theirs, dtype, shape)] = match
    return found


def _shards(entries: Sequence[Entry], shard_bytes: int) -> dict[str, list[Entry]]:
    """Return file -> its tensors."""
    groups: list[list[Entry]] = [[]]
    size = 0
    for one in entries:
        if groups[-1] and size + one.size_bytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(one)
        size += one.size_bytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{number:05d}-of-{len(groups):05d}.safetensors": one for number, one in enumerate(groups, 1)}


def _write_file(source: _Source, to: Folder, file: str, group: Sequence[Entry], entries: Mapping[Entry, Match]) -> int:
    """Write a file; return its size [bytes]."""
    header = header_of(group, {"format": "pt"})
    size = len(header) + sum(one.size_bytes for one in group)
    parts = itertools.chain([memoryview(header)], _ahead(_reads(source, group, entries)))
    to.put_stream(file, parts, size)
    return size


def _reads(
    source: _Source, group: Sequence[Entry], entries: Mapping[Entry, Match]
) -> Iterator[Callable[[], memoryview]]:
    """Yield the reads of a file's data, in order."""
    turn = itertools.cycle(source.buffers or [torch.empty(0, dtype=torch.uint8)])
    for entry in group:
        for ours in entries[entry].ours:
            pieces = source.tensors[f"model/{ours}"]
            shape, item = pieces[0].shape, ITEM_BYTES[pieces[0].dtype]
            for box in boxes(shape, item * math.prod(shape[1:]), PART_BYTES):
                yield functools.partial(_read, source.folder, pieces, box, entry, next(turn))


def _read(folder: Folder, pieces: list[Piece], box: Box, entry: Entry, buffer: Tensor) -> memoryview:
    """Return the bytes of a box in the type that they are written in, verified; in ``buffer``, if they fit into it."""
    stored = type_of(pieces[0].dtype)
    size = box.num_elements * stored.itemsize
    fits = size <= buffer.nbytes
    tensor = buffer[:size].view(stored).view(box.sizes) if fits else torch.empty(box.sizes, dtype=stored)
    read_boxes(folder, pieces, tensor, box)
    wanted = type_of(entry.dtype)
    if tensor.dtype != wanted:
        tensor = tensor.to(wanted)
        if wanted == torch.float16 and not bool(torch.isfinite(tensor).all()):
            problem = f"has no room for all numbers of {entry.name}"
            raise ConfigError(explain("dtype", "fp16", problem, "use bf16 or fp32"))
    return raw(tensor).numpy().data


def _ahead(reads: Iterable[Callable[[], memoryview]]) -> Iterator[memoryview]:
    """Yield what each call returns; the next ones run meanwhile."""
    left, running = iter(reads), collections.deque[Future[memoryview]]()
    with ThreadPoolExecutor(1, "springtide-export") as thread:
        while True:
            running.extend(thread.submit(read) for read in itertools.islice(left, _AHEAD + 1 - len(running)))
            if not running:
                return
            yield running.popleft().result()
