"""Export of low-rank adapters. Either the adapter is merged into the adapted matrices while they are read, or it is written as
a folder that PEFT loads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from springtide.checkpoint.adapters import LORA_A, LORA_B, MAGNITUDE, is_adapter
from springtide.checkpoint.format import Piece, read_manifest
from springtide.checkpoint.load import read_boxes
from springtide.checkpoint.retention import note_reader
from springtide.checkpoint.tensors import Box, type_of
from springtide.config.engine import ModelConfig
from springtide.errors import CheckpointError, ConfigError, explain
from springtide.hf.export_files import (
    MARKER,
    Exported,
    Source,
    begin,
    card,
    check_target,
    entries_of,
    facts_of,
    write_file,
)
from springtide.hf.families import Family, Match
from springtide.hf.hf_config import choose_family
from springtide.model import Decoder, merged, packed_shapes, skeleton
from springtide.storage import Folder, to_json

PEFT_WEIGHTS, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
PEFT_NAMES = {LORA_A: "lora_A.weight", LORA_B: "lora_B.weight", MAGNITUDE: "lora_magnitude_vector"}
"""Last part of an adapter tensor's name in springtide -> last part of its name in PEFT."""
_MODEL, _WEIGHT = "model/", ".weight"
BASE_TYPE = "base_precision"
"""Key in the model card: the precision in which an adapter's frozen base weights were stored."""
_BASE_TYPES = {
    "bf16": "bf16",
    "nf4": "nf4 in blocks of 64 with fp32 magnitudes, not quantised twice; embedding and head bf16",
}


def with_merged_adapter(source: Source, model: ModelConfig, name: str) -> Source:
    """Return the weights of checkpoint ``name`` to export, with its adapter merged if it has one. Raises CheckpointError if the
    checkpoint's adapter does not fit ``model``."""
    if model.adapter == "none":
        return source
    adapter = {one: pieces for one, pieces in source.tensors.items() if is_adapter(one)}
    packed = packed_shapes(_check(adapter, source, model, name))
    left = {one: pieces for one, pieces in source.tensors.items() if one not in adapter}
    merge = _Merge(source.folder, adapter, model.adapter_alpha / model.adapter_rank)
    if source.dtype is None and model.base_precision != "fp32":
        # Export in fp32. The base weights were stored in bf16 or 4 bits: rounding them again after the merge could erase small
        # changes that the adapter makes
        source = source._replace(dtype=torch.float32)
    return source._replace(tensors=left, merge=merge, packed=packed)


def export_adapter(
    run: Folder,
    name: str,
    model: ModelConfig,
    to: Folder,
    facts: Mapping[str, Any],
    base: str,
    dtype: str = "",
    ema: bool = False,
) -> Exported:
    """Write the adapter of checkpoint ``name`` of ``run`` as a folder that PEFT loads.

    Args:
        model: the ``model`` section of the config that the checkpoint was saved with.
        facts: origin of the checkpoint, for the model card.
        base: folder, URL or name of the adapter's base model, for PEFT.
        dtype: a key of ``export_files.DTYPES``; empty: the stored dtype.
        ema: write the averaged weights (``optim.ema_half_life``) in place of the weights.

    Raises:
        ConfigError: the model has no adapter, no architecture of transformers computes it, PEFT cannot express the adapter, or
            ``to`` contains files that are not an export.
        CheckpointError: the checkpoint is of another model, or damaged.
        MissingAverage: the checkpoint has no averaged weights.
    """
    if model.adapter == "none":
        raise ConfigError(explain("to", "peft", "needs an adapter, and this run has none", "use hf"))
    family = choose_family(model)
    check_target(to)
    with note_reader(run, name):
        manifest = read_manifest(run, name)
        source = Source.open(run, name, manifest, to, dtype, ema)
        adapter = {one: pieces for one, pieces in source.tensors.items() if is_adapter(one)}
        _check(adapter, source, model, name)
        places = dict(_modules(family, model))
        source = source._replace(tensors=adapter)
        entries = entries_of(source, _matches(adapter, places), name, "its adapter")
        types = str(type_of(min(one.dtype for one in entries))).removeprefix("torch.")
        facts = {**facts, **facts_of(manifest, name, family, types, ema), "base": base}
        facts |= base_facts(model)
        adapted = {places[_matrix(one)] for one in adapter}
        small = {
            "README.md": card(facts, has_end=True),
            PEFT_CONFIG: to_json(_peft(model, adapted, places, base), indent=1),
        }
        begin(to, facts, [PEFT_WEIGHTS, *small])
        written = {PEFT_WEIGHTS: write_file(source, to, PEFT_WEIGHTS, list(entries), entries)}
    # write the files in this order: adapter_config.json last, because programs load a folder that has it
    for file, text in small.items():
        to.write(file, text)
        written[file] = len(text.encode())
    to.write_json(MARKER, {**facts, "complete": True, "files": written})
    remark = f"load it on the model that it was trained from: {base}"
    if model.base_precision != "fp32":
        remark += f", held as {facts[BASE_TYPE]}"
    return Exported(
        to.url, f"an adapter of {family.architecture}", name, sum(one.size_bytes for one in entries), (remark,)
    )


class _Merge:
    """Callable that merges a checkpoint's adapter into rows of the adapted matrices; used as ``Source.merge``."""

    def __init__(self, folder: Folder, adapter: Mapping[str, list[Piece]], scale: float) -> None:
        self._folder, self._adapter, self._scale = folder, adapter, scale
        self._a: tuple[str, Tensor] = "", torch.empty(0)
        """The adapter matrix A that was read last: its name prefix and its value. It is kept because a matrix is merged a few
        rows at a time, and each time all of A is needed."""

    def __call__(self, ours: str, box: Box, rows_OI: Tensor) -> Tensor:
        prefix = _MODEL + ours.removesuffix(_WEIGHT)
        if f"{prefix}.{LORA_A}" not in self._adapter:
            return rows_OI
        if self._a[0] != prefix:
            self._a = prefix, self._read(f"{prefix}.{LORA_A}")
        here = box.offsets[0], box.sizes[0]
        b, magnitude = self._read(f"{prefix}.{LORA_B}", here), f"{prefix}.{MAGNITUDE}"
        found = self._read(magnitude, here) if magnitude in self._adapter else None
        return merged(rows_OI, self._a[1], b, self._scale, found)

    def _read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        pieces = self._adapter[name]
        shape = pieces[0].shape
        begin, size = rows or (0, shape[0])
        tensor = torch.empty(size, *shape[1:], dtype=type_of(pieces[0].dtype))
        read_boxes(self._folder, pieces, tensor, Box((begin, *(0 for _ in shape[1:])), tuple(tensor.shape)))
        return tensor


def base_facts(model: ModelConfig) -> dict[str, str]:
    """Return the model card's entry for the precision of an adapter's frozen base weights; an empty dict if it is fp32."""
    return {BASE_TYPE: _BASE_TYPES[model.base_precision]} if model.base_precision in _BASE_TYPES else {}


def _check(adapter: Mapping[str, list[Piece]], source: Source, model: ModelConfig, name: str) -> Decoder:
    """Return the decoder of ``model``, on the meta device. Raises CheckpointError if the tensors in ``adapter`` have other
    names or shapes than the adapter of this decoder."""
    vocab = source.tensors.get(f"{_MODEL}embedding.weight")
    decoder = skeleton(model, vocab[0].shape[0] if vocab else 1)
    shapes = decoder.named_parameters()
    wanted = {_MODEL + one: tuple(tensor.shape) for one, tensor in shapes if is_adapter(one)}
    found = {one: tuple(pieces[0].shape) for one, pieces in adapter.items()}
    if wanted != found:
        first, *_ = sorted(one for one in wanted.keys() | found.keys() if wanted.get(one) != found.get(one))
        told = f"{first}: {found.get(first, 'missing')} in the file, {wanted.get(first, 'missing')} by the config"
        raise CheckpointError(f"checkpoint {name} does not hold the adapter that its config describes: {told}")
    return decoder


def _modules(family: Family, model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield each matrix of springtide's decoder: its name, and the name of its module in transformers. Matrices that
    transformers joins with others into one are left out."""
    for match in family.tensors(model):
        if len(match.ours) == 1 and match.theirs.endswith(_WEIGHT):
            yield match.ours[0], match.theirs.removesuffix(_WEIGHT)


def _matrix(name: str) -> str:
    """Return the name of the matrix that the adapter tensor ``name`` adapts."""
    return name.removeprefix(_MODEL).rpartition(".")[0] + _WEIGHT


def _matches(adapter: Mapping[str, list[Piece]], places: Mapping[str, str]) -> Iterator[Match]:
    """Yield each adapter tensor as PEFT names it, matched with springtide's tensor. Raises ConfigError if transformers joins an
    adapted matrix with others into one, because PEFT cannot adapt only some rows. ``places``: name of springtide's matrix ->
    module of transformers."""
    for one in adapter:
        if (matrix := _matrix(one)) not in places:
            problem = f"cannot say that {matrix} is adapted, a part of a matrix there"
            raise ConfigError(explain("to", "peft", problem, "use hf, which merges the adapter"))
        theirs = f"base_model.model.{places[matrix]}.{PEFT_NAMES[one.rpartition('.')[2]]}"
        yield Match(theirs, (one.removeprefix(_MODEL),))


def _peft(model: ModelConfig, adapted: set[str], places: Mapping[str, str], base: str) -> dict[str, Any]:
    """Return the content of PEFT's adapter_config.json."""
    last = {one.rpartition(".")[2] for one in adapted}
    every = {one for one in places.values() if one.rpartition(".")[2] in last}
    found = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True}
    found |= {"r": model.adapter_rank, "lora_alpha": model.adapter_alpha, "use_dora": model.adapter == "dora"}
    found |= {"lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False}
    return {**found, "target_modules": sorted(last if every == adapted else adapted)}
