"""The tokenizer of an export: the ``tokenizer.json`` that its token ids belong to, found by its digest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from springtide.checkpoint.format import Meta
from springtide.corpus import TEMPLATE_BYTES
from springtide.errors import SpringtideError
from springtide.interop.hf_files import read_file, read_tokenizer
from springtide.shards import CHAT_TEMPLATE, MANIFEST, TOKENIZER, load_manifest
from springtide.store import Folder, digest, to_json

SETTINGS = "tokenizer_config.json"
EOS_LABEL, BOS_LABEL = "eos_token_id", "bos_token_id"
"""Labels of an imported checkpoint."""


class TokenizerFiles(NamedTuple):
    """Files of a tokenizer, and the ids that end and begin a text; empty and None if unknown."""

    files: dict[str, str]
    eos_id: int | None
    bos_id: int | None


def tokenizer_files(
    meta: Meta, folders: Sequence[Folder], vocab_size: int, max_length: int
) -> tuple[TokenizerFiles, list[str]]:
    """Return the tokenizer of a checkpoint, and remarks for the user. ``folders``: datasets, or folders with a
    ``tokenizer.json``; the first counts whose digest the checkpoint has, and the first of them that has a chat template.
    Raises ConfigError for a file of one that is too large, or that leads out of its folder."""
    eos_id, bos_id = _label(meta, EOS_LABEL, vocab_size), _label(meta, BOS_LABEL, vocab_size)
    if not meta.tokenizer_digest:
        return TokenizerFiles({}, eos_id, bos_id), ["no tokenizer is known for this checkpoint: none is written"]
    folders = [folder.confined() for folder in folders]
    for folder in folders:
        text = _text(folder, meta.tokenizer_digest)
        if text is None:
            continue
        try:
            manifest = load_manifest(folder) if folder.exists(MANIFEST) else None
        except (SpringtideError, OSError):
            manifest = None
        if manifest is not None:
            eos_id, bos_id = manifest.end_of_text, manifest.begin_of_text
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_length}
        settings |= {"clean_up_tokenization_spaces": False}
        for key, index in (("eos_token", eos_id), ("bos_token", bos_id)):
            if (token := token_of(text, index)) is not None:
                settings[key] = token
        files = {TOKENIZER: text, SETTINGS: to_json(settings, indent=1)}
        with_it = (one for one in folders if _text(one, meta.tokenizer_digest) and one.exists(CHAT_TEMPLATE))
        if (named := next(with_it, None)) is not None:
            files[CHAT_TEMPLATE] = read_file(named, CHAT_TEMPLATE, TEMPLATE_BYTES).decode("utf-8", "replace")
        return TokenizerFiles(files, eos_id, bos_id), []
    looked = ", ".join(folder.url for folder in folders) or "nowhere"
    remark = f"the tokenizer {meta.tokenizer_digest} was not found, and is not written; looked in {looked}"
    return TokenizerFiles({}, eos_id, bos_id), [remark]


def token_of(tokenizer_json: str, index: int | None) -> str | None:
    """Return the token with an id, as a ``tokenizer.json`` spells it; None if there is none."""
    if index is None:
        return None
    try:
        found: Any = json.loads(tokenizer_json)
        for one in found.get("added_tokens") or ():
            if one["id"] == index:
                return str(one["content"])
        words = found["model"]["vocab"]
        if isinstance(words, list):
            return str(words[index][0])
        return next((token for token, number in words.items() if number == index), None)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None


def _text(folder: Folder, expected: str) -> str | None:
    try:
        text = read_tokenizer(folder)
    except OSError:
        return None
    return text if digest.of_bytes(text.encode()) == expected else None


def _label(meta: Meta, name: str, vocab_size: int) -> int | None:
    text = meta.labels.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and int(text) < vocab_size else None
