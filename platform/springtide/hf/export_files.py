"""Files of an export, streamed from a checkpoint's pieces (saved slices of tensors), a few rows of one tensor at a time.

``springtide.json`` is written first, with ``complete: false``. The config file is written after all weights, because programs
only load a folder that has a config file. Then ``springtide.json`` is written again, with the sizes of all files [bytes].
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
from springtide.checkpoint.format import Manifest, Piece, checkpoints
from springtide.checkpoint.load import by_tensor, read_boxes, read_pieces
from springtide.checkpoint.tensors import Box, raw, type_name, type_of
from springtide.checkpoint.validate import ITEM_BYTES
from springtide.checkpoint.weights_only import boxes
from springtide.errors import CheckpointError, ConfigError, DamagedFile, explain, printable, redacted
from springtide.hf.families import Family, Match
from springtide.hf.safetensors_header import Entry, header_of
from springtide.model import converted as converted_rows
from springtide.storage import Folder

MARKER = "springtide.json"
"""File that marks a folder as an export. It records the origin, and whether the export is complete."""
PART_BYTES = 16 * 2**20
"""Largest number of bytes that are read or written at a time (a part: some rows of a tensor), unless a single row is larger."""
_AHEAD = 2
"""Number of parts (blocks of rows) that are read ahead while an earlier part is written."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Option ``dtype`` of an export -> dtype in which weights are written."""
_LAST = ("config.json", "adapter_config.json")
"""Config files. They are written last and removed first, because programs load only a folder that has one."""
_OURS = re.compile(
    r"(model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|config\.json|README\.md|tokenizer(_config)?\.json"
    r"|chat_template\.jinja|generation_config\.json|adapter_model\.safetensors|adapter_config\.json)"
)


class Exported(NamedTuple):
    """Result of a finished export."""

    url: str
    architecture: str
    checkpoint: str
    size_bytes: int
    """Size of all written weights [bytes]."""
    remarks: tuple[str, ...]
    """Sentences for the user, such as that no tokenizer was found."""


_NONE: dict[str, tuple[int, int]] = {}


class Source(NamedTuple):
    """The weights of a checkpoint to export: their pieces (saved slices of tensors), and the dtype to write."""

    folder: Folder
    tensors: dict[str, list[Piece]]
    """Tensor name, such as ``model/blocks.0.ffn.up.weight`` -> pieces of the tensor."""
    dtype: torch.dtype | None
    """Dtype to write; None: each tensor's stored dtype."""
    buffers: list[Tensor]
    """uint8 buffers to read into, used in turn. Empty if the export goes to an object store: an upload may still read one block
    of rows when the next block is needed, so no buffer can be reused."""
    merge: Callable[[str, Box, Tensor], Tensor]
    """Function that merges the adapter into rows of a matrix and returns them, fp32. Without an adapter it returns the rows
    unchanged."""
    packed: Mapping[str, tuple[int, int]] = _NONE
    """Matrices stored in 4 bits (``model.base_precision``): name -> unpacked shape. They are read as fp32."""

    def kind(self, ours: str) -> tuple[str, tuple[int, ...]]:
        """Return the dtype and the shape in which springtide's tensor ``ours`` is read."""
        piece = self.tensors[f"model/{ours}"][0]
        return ("F32", self.packed[ours]) if ours in self.packed else (piece.dtype, piece.shape)

    @classmethod
    def open(cls, run: Folder, name: str, manifest: Manifest, to: Folder, dtype: str, ema: bool) -> Source:
        """Read from the checkpoint's indexes where the tensors of checkpoint ``name`` of ``run`` are stored. ``dtype``: a key
        of DTYPES; empty: the stored dtype. ``ema``: use the averaged weights. Raises ConfigError, CheckpointError and
        MissingAverage."""
        if dtype and dtype not in DTYPES:
            remedy = "omit it for the stored type"
            raise ConfigError(explain("dtype", dtype, f"is not one of {', '.join(DTYPES)}", remedy))
        pieces = read_pieces(run, name, manifest)
        found = by_tensor(as_weights(pieces) if ema else [one for one in pieces if one.tensor.startswith("model/")])
        buffers = [torch.empty(PART_BYTES, dtype=torch.uint8) for _ in range(_AHEAD + 1)] if to.is_local else []
        return cls(checkpoints(run), found, DTYPES.get(dtype), buffers, lambda ours, box, rows: rows)


def entries_of(source: Source, matches: Iterable[Match], name: str, what: str) -> dict[Entry, Match]:
    """Return the tensors to write, in order. Each is mapped to its match: the names of the checkpoint's tensors that are joined
    to make it. Raises CheckpointError if checkpoint ``name`` has other tensors than ``matches``. ``what``: name of the model in
    the error message."""
    matches = list(matches)
    expected = {f"model/{one}" for match in matches for one in match.ours}
    missing, extra = sorted(expected - source.tensors.keys()), sorted(source.tensors.keys() - expected)
    if missing or extra:
        told = [f"lacks {', '.join(missing[:3])}"] if missing else []
        told += [f"has {', '.join(extra[:3])}, which {what} does not"] if extra else []
        raise CheckpointError(f"checkpoint {name} does not fit the model of its config: it {' and '.join(told)}")
    found: dict[Entry, Match] = {}
    for match in matches:
        types, shapes = zip(*map(source.kind, match.ours), strict=True)
        shape = (sum(part[0] for part in shapes), *shapes[0][1:])
        if any(part[1:] != shape[1:] for part in shapes):
            raise CheckpointError(f"checkpoint {name}: the tensors to join as {match.theirs} have different widths")
        dtype = type_name(source.dtype) if source.dtype is not None else types[0]
        found[Entry(match.theirs, dtype, shape)] = match
    return found


def check_target(to: Folder) -> None:
    """Raise ConfigError if the folder ``to`` holds files and was not written by an export."""
    names = to.names()
    try:
        known = not names or (MARKER in names and isinstance(to.read_json(MARKER)["files"], (dict, list)))
    except (DamagedFile, KeyError, TypeError):
        known = False
    if not known:
        problem = f"holds {', '.join(names[:3])}, which no export of springtide wrote"
        raise ConfigError(explain("out", to.url, problem, "name another folder, or empty this one"))


def begin(to: Folder, facts: Mapping[str, Any], files: Sequence[str]) -> None:
    """Mark the folder ``to`` as an export in progress, and remove the files of an earlier export. Its config file is removed
    first, so that no program loads the incomplete folder."""
    before = set(to.names())
    to.write_json(MARKER, {**facts, "complete": False, "files": sorted(files)})
    for name in sorted((one for one in before if _OURS.fullmatch(one)), key=lambda one: one not in _LAST):
        to.remove(name)
    if to.is_local:
        to.sweep()


def facts_of(manifest: Manifest, name: str, family: Family, dtype: str, ema: bool) -> dict[str, Any]:
    """Return the origin of an exported checkpoint, such as step and tokens, for the model card."""
    meta = manifest.meta
    found = {"checkpoint": name, "step": meta.step, "tokens": meta.tokens, "chain": meta.chain}
    found |= {"order_identity": meta.order_identity, "config_fingerprint": meta.config_fingerprint}
    found |= {"code_fingerprint": meta.code_fingerprint, "tokenizer_digest": meta.tokenizer_digest}
    return {**found, "labels": meta.labels, "architecture": family.architecture, "dtype": dtype, "averaged": ema}


def write_file(source: Source, to: Folder, file: str, group: Sequence[Entry], entries: Mapping[Entry, Match]) -> int:
    """Write the tensors ``group`` to a safetensors file and return its size [bytes]. ``entries``: tensor to write -> the
    checkpoint's tensors that it is made of."""
    header = header_of(group, {"format": "pt"})
    size = len(header) + sum(one.size_bytes for one in group)
    parts = itertools.chain([memoryview(header)], read_ahead(_reads(source, group, entries)))
    to.put_stream(file, parts, size)
    return size


def _reads(
    source: Source, group: Sequence[Entry], entries: Mapping[Entry, Match]
) -> Iterator[Callable[[], memoryview]]:
    """Yield, for each part (block of rows) of a file in order, a function that reads the part."""
    turn = itertools.cycle(source.buffers or [torch.empty(0, dtype=torch.uint8)])
    for entry in group:
        for ours in entries[entry].ours:
            kind, shape = source.kind(ours)
            for box in boxes(shape, ITEM_BYTES[kind] * math.prod(shape[1:]), PART_BYTES):
                yield functools.partial(_read, source, ours, box, entry, next(turn))


def _read(source: Source, ours: str, box: Box, entry: Entry, buffer: Tensor) -> memoryview:
    """Return the verified bytes of ``box`` (a range of rows) of the checkpoint's tensor ``ours``, in the dtype of ``entry``.
    They are read into ``buffer`` if they fit."""
    tensor = converted(read_rows(source, ours, box, buffer), type_of(entry.dtype), entry.name)
    return raw(tensor).numpy().data


def read_rows(source: Source, ours: str, box: Box, buffer: Tensor) -> Tensor:
    """Return the verified rows ``box`` (a range of rows) of the checkpoint's tensor ``ours``, read into ``buffer`` if they fit.
    The dtype is the stored dtype, or fp32 if an adapter was merged or the rows were stored in 4 bits."""
    pieces = source.tensors[f"model/{ours}"]
    if ours in source.packed:
        width = pieces[0].shape[1]
        rows = torch.empty(box.sizes[0], width, dtype=torch.uint8)
        read_boxes(source.folder, pieces, rows, Box(box.offsets, (box.sizes[0], width)))
        return source.merge(ours, box, converted_rows(rows, box.sizes[1], torch.float32))
    stored = type_of(pieces[0].dtype)
    size = box.num_elements * stored.itemsize
    fits = size <= buffer.nbytes
    tensor = buffer[:size].view(stored).view(box.sizes) if fits else torch.empty(box.sizes, dtype=stored)
    read_boxes(source.folder, pieces, tensor, box)
    return source.merge(ours, box, tensor)


def converted(tensor: Tensor, wanted: torch.dtype, name: str) -> Tensor:
    """Return rows of the tensor ``name``, converted to the dtype ``wanted``. Raises ConfigError if a number is outside the
    range of fp16."""
    if tensor.dtype == wanted:
        return tensor
    tensor = tensor.to(wanted)
    if wanted == torch.float16 and not bool(torch.isfinite(tensor).all()):
        problem = f"has no room for all numbers of {name}"
        raise ConfigError(explain("dtype", "fp16", problem, "use bf16 or fp32"))
    return tensor


def read_ahead(reads: Iterable[Callable[[], memoryview]]) -> Iterator[memoryview]:
    """Call each of ``reads`` and yield its result, in order. A thread already runs the next calls while the consumer uses a
    result."""
    left, running = iter(reads), collections.deque[Future[memoryview]]()
    with ThreadPoolExecutor(1, "springtide-export") as thread:
        while True:
            running.extend(thread.submit(read) for read in itertools.islice(left, _AHEAD + 1 - len(running)))
            if not running:
                return
            yield running.popleft().result()


# The model card of an export: where the weights come from. Pure.

_ROWS = {
    "run": "Run",
    "base": "Adapter of",
    "base_precision": "Weights under the adapter",
    "checkpoint": "Checkpoint",
    "step": "Steps",
    "tokens": "Tokens",
    "chain": "Chain",
    "order_identity": "Data order",
    "config_fingerprint": "Config",
    "code_fingerprint": "Code",
    "tokenizer_digest": "Tokenizer",
    "dtype": "Type of the weights",
}
"""Key in ``springtide.json`` -> label in the table of the model card."""


def card(facts: Mapping[str, Any], has_end: bool) -> str:
    """Return README.md of an export, its model card. ``facts``: content of the export's springtide.json; ``has_end``: True if
    the id that ends a text is known."""
    library = "peft" if "base" in facts else "transformers"
    lines = ["---", f"library_name: {library}", "pipeline_tag: text-generation", "tags:", "- springtide", "---", ""]
    lines += [f"# {_plain(facts.get('run', 'model'))}", ""]
    averaged = "averaged weights" if facts.get("averaged") else "weights"
    what = f"{averaged} of the adapter" if "base" in facts else averaged
    lines += [f"The {what} of a springtide run, for `{facts['architecture']}` of transformers.", ""]
    if not has_end:
        lines += ["The id that ends a text is not known: set `eos_token_id` before you generate text.", ""]
    lines += ["## Where it comes from", "", "| | |", "|---|---|"]
    lines += [f"| {told} | {_code(facts[key])} |" for key, told in _ROWS.items() if facts.get(key) not in ("", None)]
    for url, found in facts.get("datasets", {}).items():
        lines.append(f"| Dataset {_code(url)} | {_code(found)} |")
    for url in facts.get("descends_from", ()):
        lines.append(f"| Begun with | {_code(url)} |")
    for label, value in facts.get("labels", {}).items():
        lines.append(f"| {_plain(label)} | {_code(value)} |")
    lines += [
        "",
        "The chain is a hash over all samples that were trained on, in order: `springtide verify RUN` computes it",
    ]
    lines += ["again from the datasets. Digests are of manifests, which hold those of all their files.", ""]
    return "\n".join(lines)


def _plain(value: Any) -> str:
    """Return ``value`` as text without characters that could be Markdown or HTML."""
    text = printable(redacted(str(value))).replace("\n", " ")
    return "".join(one for one in text if one.isalnum() or one in " -_.,:/@+()")


def _code(value: Any) -> str:
    text = printable(redacted(str(value))).replace("\n", " ").replace("`", "'").replace("|", "/")
    return f"`{text}`"
