"""Write a committed checkpoint as a GGUF file, which llama.cpp and what is built on it load.

pieces of any world size -> a few rows of one tensor at a time, -> as llama.cpp has them: q and k -> model.gguf, written last
and adapters                verified, and with its adapter         in pairs, norms in fp32, Q8_0
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from springtide.checkpoint.format import read_manifest
from springtide.checkpoint.retention import note_reader
from springtide.checkpoint.tensors import Box, raw, type_of
from springtide.checkpoint.validate import ITEM_BYTES
from springtide.checkpoint.weights_only import boxes
from springtide.config.engine import ModelConfig
from springtide.errors import ConfigError, explain
from springtide.interop import export_files
from springtide.interop.adapters import base_facts, with_merged_adapter
from springtide.interop.export_files import (
    DTYPES,
    GGUF,
    MARKER,
    Exported,
    Source,
    begin,
    check_target,
    converted,
    entries_of,
    facts_of,
    read_ahead,
    read_rows,
)
from springtide.interop.families import Match
from springtide.interop.gguf_families import (
    ROPE_FACTORS,
    GgufFamily,
    gguf_family,
    gguf_matches,
    gguf_metadata,
    is_rotated,
    rope_factors,
    version_remarks,
)
from springtide.interop.gguf_header import BLOCK, GgufTensor, Value, header_of, padding
from springtide.interop.gguf_tokenizer import tokenizer_metadata
from springtide.interop.hf_card import card
from springtide.interop.hf_config import choose_family
from springtide.interop.hf_tokenizer import tokenizer_files
from springtide.interop.safetensors_header import Entry
from springtide.store import Folder

Q8_0 = "q8_0"
_TYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16", Q8_0: "Q8_0"}
"""``--dtype`` -> type of the matrices."""
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
"""Type of the matrices -> general.file_type."""
_QUANTIZATION_VERSION = 2


@dataclasses.dataclass(frozen=True)
class _Rows:
    """A tensor of the file and where its rows come from."""

    tensor: GgufTensor
    match: Match
    added: float
    """1 for a norm that scales by one plus its weight: llama.cpp scales by what is in the file."""
    paired: int
    """Rows of a head whose halves are put side by side; 0: rows stay in their order."""


def export_gguf(
    run: Folder,
    name: str,
    model: ModelConfig,
    to: Folder,
    facts: Mapping[str, Any],
    tokenizer: Sequence[Folder] = (),
    dtype: str = "",
    ema: bool = False,
) -> Exported:
    """Write checkpoint ``name`` of ``run`` as a folder with a GGUF file.

    Args:
        model: of the config that it was saved with.
        facts: of its origin, for the model card.
        tokenizer: as in ``export_checkpoint``.
        dtype: type of the matrices, a key of DTYPES or ``q8_0``; empty is the type that they are stored in. Vectors are fp32.
        ema: write the averaged weights.

    Raises:
        ConfigError: no architecture of llama.cpp computes this model, it would make other ids of a text than the tokenizer,
            or ``to`` holds what is not an export.
        CheckpointError: the checkpoint is of another model, or its bytes are bad.
        MissingAverage: it has no averaged weights.
    """
    if dtype and dtype not in _TYPES:
        raise ConfigError(explain("dtype", dtype, f"is not one of {', '.join(_TYPES)}", "omit it for the stored type"))
    family = choose_family(model)
    gguf = gguf_family(family, model)
    check_target(to)
    with note_reader(run, name):
        manifest = read_manifest(run, name)
        source = Source.open(run, name, manifest, to, dtype if dtype in DTYPES else "", ema)
        source = with_merged_adapter(source, model, name)
        entries = entries_of(source, gguf_matches(family, gguf, model), name, gguf.name)
        rows = _rows(source, gguf, model, entries, dtype)
        vocab = rows[0].tensor.shape[0]
        told, remarks = tokenizer_files(manifest.meta, tokenizer, vocab, model.max_sequence_length)
        words, more = tokenizer_metadata(told, vocab)
        kind = rows[0].tensor.type
        metadata: dict[str, Value] = {
            "general.architecture": gguf.name,
            "general.type": "model",
            "general.name": str(facts.get("run", "model")),
            "general.file_type": _FILE_TYPES[kind],
            "general.quantization_version": _QUANTIZATION_VERSION,
            **gguf_metadata(gguf, model, vocab),
            **words,
        }
        facts = {**facts, **facts_of(manifest, name, family, kind, ema), "library": "gguf", "architecture": gguf.name}
        facts |= base_facts(model)
        factors = rope_factors(model) if model.rope_scaling == "llama3" else []
        extra = [GgufTensor(ROPE_FACTORS, "F32", (len(factors),))] if factors else []
        tensors = [*extra, *(one.tensor for one in rows)]
        header = header_of(metadata, tensors)
        readme = card(facts, has_end=True)
        begin(to, facts, ["README.md", GGUF])
        to.write("README.md", readme)
        size = len(header) + sum(one.size_bytes + padding(one.size_bytes) for one in tensors)
        to.put_stream(GGUF, _parts(source, header, factors, rows), size)
    to.write_json(MARKER, {**facts, "complete": True, "files": {"README.md": len(readme.encode()), GGUF: size}})
    total = sum(one.size_bytes for one in tensors)
    return Exported(to.url, gguf.name, name, total, (*remarks, *more, *version_remarks(gguf, model)))


def _rows(
    source: Source, gguf: GgufFamily, model: ModelConfig, entries: Mapping[Entry, Match], dtype: str
) -> list[_Rows]:
    """Return the tensors of the file that the checkpoint has. Raises ConfigError if one cannot be cut into blocks."""
    found = []
    for entry, match in entries.items():
        kind = "F32"
        if len(entry.shape) > 1:
            kind = _TYPES.get(dtype) or (entry.dtype if entry.dtype in _FILE_TYPES else "F32")
        if kind == "Q8_0" and entry.shape[-1] % BLOCK:
            problem = f"has blocks of {BLOCK}, and the rows of {entry.name} have {entry.shape[-1]} numbers"
            raise ConfigError(explain("dtype", Q8_0, problem, "use bf16"))
        added = float(model.norm_unit_offset and entry.name.endswith("norm.weight"))
        paired = model.head_width if gguf.pairs and is_rotated(match) else 0
        found.append(_Rows(GgufTensor(entry.name, kind, entry.shape), match, added, paired))
    return found


def _parts(source: Source, header: bytes, factors: Sequence[float], rows: Sequence[_Rows]) -> Iterator[memoryview]:
    """Yield all bytes of the file, in order."""
    yield memoryview(header)
    if factors:
        data = torch.tensor(factors, dtype=torch.float32).numpy().tobytes()
        yield memoryview(data + bytes(padding(len(data))))
    yield from read_ahead(_reads(source, rows))


def _reads(source: Source, rows: Sequence[_Rows]) -> Iterator[Callable[[], memoryview]]:
    """Yield the reads of all tensors, in order, and what pads them."""
    turn = itertools.cycle(source.buffers or [torch.empty(0, dtype=torch.uint8)])
    for one in rows:
        unit = one.paired or 1  # a head is not cut
        for ours in one.match.ours:
            kind, shape = source.kind(ours)
            size = unit * ITEM_BYTES[kind] * math.prod(shape[1:])
            for box in boxes((shape[0] // unit, *shape[1:]), size, export_files.PART_BYTES):
                held = Box((unit * box.offsets[0], *box.offsets[1:]), (unit * box.sizes[0], *box.sizes[1:]))
                yield functools.partial(_read, source, ours, held, one, next(turn))
        if rest := padding(one.tensor.size_bytes):
            yield functools.partial(_zeros, rest)


def _zeros(count: int) -> memoryview:
    return memoryview(bytes(count))


def _read(source: Source, ours: str, box: Box, one: _Rows, buffer: Tensor) -> memoryview:
    """Return the bytes of a box as they are written."""
    rows = read_rows(source, ours, box, buffer)
    if one.added:
        rows = rows.float() + one.added
    if one.paired:
        heads = rows.view(-1, 2, one.paired // 2, *rows.shape[1:])
        rows = heads.transpose(1, 2).reshape(rows.shape)
    if one.tensor.type == "Q8_0":
        rows = _blocks(rows, one.tensor.name)
    else:
        rows = converted(rows, type_of(one.tensor.type), one.tensor.name)
    return raw(rows).numpy().data


def _blocks(rows: Tensor, name: str) -> Tensor:
    """Return rows as Q8_0: of 32 numbers each a scale in fp16 and the multiples of it in int8. Raises ConfigError for a scale
    that is not finite."""
    numbers = rows.float().view(-1, BLOCK)
    scale = numbers.abs().amax(1, keepdim=True) / 127
    if not bool(torch.isfinite(scale.half()).all()):
        raise ConfigError(explain("dtype", Q8_0, f"has no room for all numbers of {name}", "use bf16 or fp32"))
    multiples = numbers * torch.where(scale > 0, 1 / scale, 0.0)
    rounded = (multiples.sign() * (multiples.abs() + 0.5).floor()).to(torch.int8)  # halves away from zero, as ggml
    return torch.cat([scale.half().view(torch.uint8), rounded.view(torch.uint8)], 1)
