"""Tokenizers and chat templates in the format of transformers. An import reads them from the model's folder; an export
searches folders for the ``tokenizer.json`` with the checkpoint's digest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from springtide.checkpoint.format import Meta
from springtide.corpus import TEMPLATE_BYTES, ChatTemplate, Tokenizer
from springtide.errors import ConfigError, SpringtideError, explain, in_one_line
from springtide.hf.hf_files import (
    GENERATION,
    SETTINGS_BYTES,
    ids_of,
    read_file,
    read_generation,
    read_settings,
    read_tokenizer,
    written_generation,
)
from springtide.shards import CHAT_TEMPLATE, MANIFEST, TOKENIZER, Manifest, load_manifest
from springtide.storage import Folder, digest, to_json

SETTINGS = "tokenizer_config.json"
EOS_LABEL, BOS_LABEL = "eos_token_id", "bos_token_id"
"""Keys of a checkpoint's metadata: an imported checkpoint stores there the ids that end and begin a text."""


class TokenizerFiles(NamedTuple):
    """Files of a tokenizer, and the ids that end and begin a text. If unknown, ``end_ids`` is empty and ``bos_id`` is None."""

    files: dict[str, str]
    end_ids: tuple[int, ...]
    """Ids that end a text or a turn; the first one ends a document."""
    bos_id: int | None

    @property
    def eos_id(self) -> int | None:
        """The id that ends a document; None if unknown."""
        return next(iter(self.end_ids), None)


def tokenizer_files(
    meta: Meta, folders: Sequence[Folder], vocab_size: int, max_length: int
) -> tuple[TokenizerFiles, list[str]]:
    """Return the tokenizer of a checkpoint with its chat template and ``generation_config.json``, and remarks for the user.

    Three kinds of ids end a text: the id that ends documents of the dataset, the end ids of the imported model, and the id that
    ends an answer in the chat template. The exported ``eos_token`` ends documents if there is no template, or the template
    itself writes ``eos_token``. Otherwise it is the token that ends an answer, for programs that stop only at ``eos_token``.

    Args:
        meta: metadata of the checkpoint.
        folders: datasets, runs, or other folders with a ``tokenizer.json``. Folders whose tokenizer does not have the
            checkpoint's digest are ignored. Each file is read from the first remaining folder that has it.
        vocab_size: number of rows of the embedding.
        max_length: most tokens that the model reads at once.

    Raises:
        ConfigError: a file of one of the folders is too large, or is a link that leads out of its folder.
    """
    eos_id, bos_id = _label(meta, EOS_LABEL, vocab_size), _label(meta, BOS_LABEL, vocab_size)
    if not meta.tokenizer_digest:
        remark = "no tokenizer is known for this checkpoint: none is written"
        return TokenizerFiles({}, () if eos_id is None else (eos_id,), bos_id), [remark]
    confined = [folder.confined() for folder in folders]
    texts = {folder: found for folder in confined if (found := _text(folder, meta.tokenizer_digest)) is not None}
    known = list(texts)
    if not known:
        looked = ", ".join(folder.url for folder in folders) or "nowhere"
        remark = f"the tokenizer {meta.tokenizer_digest} was not found, and is not written; looked in {looked}"
        return TokenizerFiles({}, () if eos_id is None else (eos_id,), bos_id), [remark]
    text = texts[known[0]]
    if (manifest := _manifest(known[0])) is not None:
        eos_id = manifest.end_of_text
        is_separator = manifest.whole_documents and manifest.begin_of_text == eos_id
        bos_id = None if is_separator else manifest.begin_of_text
    files, remarks = {TOKENIZER: text}, list[str]()
    template, ends = "", tuple[int, ...]()
    if (folder := next((one for one in known if one.exists(CHAT_TEMPLATE)), None)) is not None:
        template = read_file(folder, CHAT_TEMPLATE, TEMPLATE_BYTES).decode("utf-8", "replace")
        files[CHAT_TEMPLATE] = template
        if manifest is not None and bos_id not in (None, eos_id) and "bos_token" not in template:
            # let the template write bos_token: the dataset's chats begin with it, but transformers adds it only if the template
            # writes it
            template = f"{{{{- bos_token }}}}{template}"
            files[CHAT_TEMPLATE] = template
        ends, problems = _ends_of(template, text, eos_id, bos_id)
        remarks += problems
    folder = next((one for one in known if one.exists(GENERATION)), None)
    kept = read_generation(folder, {}, vocab_size) if folder is not None else {}
    imported = ids_of(kept.get("eos_token_id"), vocab_size)
    end_ids = tuple(dict.fromkeys([*([] if eos_id is None else [eos_id]), *imported, *ends]))
    if end_ids:
        files[GENERATION] = to_json(written_generation(kept, end_ids, bos_id), indent=1)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_length}
    settings |= {"clean_up_tokenization_spaces": False}
    of_turns = ends[0] if ends and "eos_token" not in template else eos_id
    for key, index in (("eos_token", of_turns), ("bos_token", bos_id)):
        if (token := token_of(text, index)) is not None:
            settings[key] = token
    files[SETTINGS] = to_json(settings, indent=1)
    return TokenizerFiles(files, end_ids, bos_id), remarks


def _manifest(folder: Folder) -> Manifest | None:
    try:
        return load_manifest(folder) if folder.exists(MANIFEST) else None
    except (SpringtideError, OSError):
        return None


def _ends_of(template: str, text: str, eos_id: int | None, bos_id: int | None) -> tuple[tuple[int, ...], list[str]]:
    """Return the ids that end an answer in a chat template, and a remark for the user if the template cannot be used."""
    try:
        vocabulary = Tokenizer.from_json(text, TOKENIZER, "" if eos_id is None else eos_id)
        return ChatTemplate(CHAT_TEMPLATE, template, vocabulary, bos_id).ends, []
    except SpringtideError as error:
        return (), [f"what ends an answer is not known: {in_one_line(error)}"]


def token_of(tokenizer_json: str, index: int | None) -> str | None:
    """Return the token with the id ``index``, as a ``tokenizer.json`` spells it; None if it has no such token."""
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


# The chat template of a model's folder, kept as unchanged text. A template is untrusted code: it runs only in a sandbox.

_DEFAULT, _KEY = "default", "chat_template"
_REMEDY = "correct the file, or remove the template from it"


def their_template(folder: Folder) -> str:
    """Return the chat template of a folder in the format of transformers; an empty text if there is none. It is the file
    ``chat_template.jinja``, or else the template in ``tokenizer_config.json`` (if there are several, the one named default).

    Raises:
        ConfigError: the template is not text, is too large, or is a link that leads out of the folder.
    """
    folder = folder.confined()
    if folder.exists(CHAT_TEMPLATE):
        data = read_file(folder, CHAT_TEMPLATE, TEMPLATE_BYTES)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            problem = f"is not UTF-8 ({error})"
            raise ConfigError(explain(folder.where(CHAT_TEMPLATE), len(data), problem, "save it as UTF-8")) from None
    if not folder.exists(SETTINGS):
        return ""
    where = f"{folder.where(SETTINGS)}: {_KEY}"
    found = _default(read_settings(folder, SETTINGS, SETTINGS_BYTES).get(_KEY))
    if found is None:
        return ""
    try:
        size = len(found.encode()) if isinstance(found, str) else -1
    except UnicodeEncodeError:  # raised if the template has half of a surrogate pair
        size = -1
    if size < 0:
        raise ConfigError(explain(where, str(found)[:100], "is not the text of a template", _REMEDY))
    if size > TEMPLATE_BYTES:
        raise ConfigError(explain(where, size, f"are more than {TEMPLATE_BYTES:,} bytes", _REMEDY))
    return str(found)


def _default(value: Any) -> Any:
    """Return the template named default if ``value`` is a list of named templates, as in older tokenizers; else return
    ``value``."""
    if not isinstance(value, list):
        return value
    named = [one.get("template") for one in value if isinstance(one, dict) and one.get("name") == _DEFAULT]
    return named[0] if named else None
