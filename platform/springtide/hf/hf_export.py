"""Write a committed (complete) checkpoint as a folder that transformers loads. Needs no process group and no GPU, and never
holds the model in memory.

tensor slices saved at -> a few rows of one tensor at a time,  -> model-00001-of-00002.safetensors, ...
any world size            verified, with the adapter merged       then tokenizer, README.md, index, config.json
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from springtide.checkpoint.format import read_manifest
from springtide.checkpoint.retention import note_reader
from springtide.checkpoint.tensors import type_of
from springtide.config.engine import ModelConfig
from springtide.hf.adapters import base_facts, with_merged_adapter
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
from springtide.hf.hf_config import FILE, choose_family, written_config
from springtide.hf.hf_tokenizer import tokenizer_files
from springtide.hf.safetensors_header import INDEX, SINGLE, Entry
from springtide.storage import Folder, to_json

SHARD_BYTES = 5 * 10**9
"""Largest size of a safetensors file in bytes, unless one tensor is larger; the default of transformers."""


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
        model: the ``model`` section of the config that the checkpoint was saved with.
        facts: origin of the checkpoint, for the model card.
        tokenizer: folders in which to search for the checkpoint's ``tokenizer.json``, which is recognised by its digest.
        dtype: a key of DTYPES; empty: the stored dtype.
        ema: write the averaged weights (``optim.ema_half_life``) in place of the weights.
        shard_bytes: most bytes of a file, unless one tensor is larger.

    Raises:
        ConfigError: no architecture of transformers computes this model, or ``to`` contains files that are not an export.
        CheckpointError: the checkpoint is of another model, or damaged.
        MissingAverage: the checkpoint has no averaged weights.
    """
    family = choose_family(model)
    check_target(to)
    with note_reader(run, name):
        manifest = read_manifest(run, name)
        source = with_merged_adapter(Source.open(run, name, manifest, to, dtype, ema), model, name)
        entries = entries_of(source, family.tensors(model), name, family.architecture)
        files = _shards(list(entries), shard_bytes)
        vocab = next(iter(entries)).shape[0]
        stored = {one.dtype for one in entries}
        told, remarks = tokenizer_files(manifest.meta, tokenizer, vocab, model.max_sequence_length)
        names = str(type_of(sorted(stored)[0])).removeprefix("torch.")
        config = written_config(family, model, vocab, names, told.end_ids, told.bos_id)
        facts = {**facts, **facts_of(manifest, name, family, names, ema), **base_facts(model)}
        small = {**told.files, "README.md": card(facts, bool(told.end_ids))}
        total = sum(one.size_bytes for one in entries)
        if len(files) > 1:
            places = {one.name: file for file, group in files.items() for one in group}
            small[INDEX] = to_json({"metadata": {"total_size": total}, "weight_map": places}, indent=1)
        small[FILE] = to_json(config, indent=1)
        begin(to, facts, [*files, *small])
        written = {file: write_file(source, to, file, group, entries) for file, group in files.items()}
    # write the files in this order: config.json last, because programs load a folder that has it
    for file, text in small.items():
        to.write(file, text)
        written[file] = len(text.encode())
    to.write_json(MARKER, {**facts, "complete": True, "files": written})
    return Exported(to.url, family.architecture, name, total, tuple(remarks))


def _shards(entries: Sequence[Entry], shard_bytes: int) -> dict[str, list[Entry]]:
    """Split tensors into files of at most ``shard_bytes``. Returns file name -> tensors of the file."""
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
