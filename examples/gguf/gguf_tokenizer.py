"""A ``tokenizer.json`` as the metadata of a GGUF file, if llama.cpp makes the same ids of a text.

llama.cpp has the pattern that cuts a text into words as code, under a name. A byte-level BPE whose pattern it has goes out;
every other tokenizer is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gguf_families import Value

from springtide.corpus.tokenizer import PATTERNS, Tokenizer
from springtide.errors import ConfigError, explain
from springtide.hf import ImportedModel
from springtide.shards import TOKENIZER

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
"""Types of tokens."""
_REMEDY = "use convert_hf_to_gguf.py of llama.cpp with the original tokenizer's files beside the export"


class _Pre(NamedTuple):
    """A pattern of llama.cpp."""

    name: str
    whole_words: bool
    """Whether a word that is a token is that token, whatever the merges say."""


_LLAMA3 = (_Pre("llama-bpe", True), _Pre("dbrx", False))
_PRES: dict[str, tuple[_Pre, ...]] = {
    PATTERNS["gpt2"]: (_Pre("gpt-2", False),),
    PATTERNS["llama3"]: _LLAMA3,
    PATTERNS["gpt4"]: _LLAMA3,
    PATTERNS["qwen"]: (_Pre("qwen2", False),),
    # GPT-2's and GPT-4's as tiktoken has them, in Oniguruma's syntax
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++\z|\s+(?!\S)|\s": (_Pre("gpt-2", False),),
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++\z|\s*[\r\n]|\s+(?!\S)|\s": (
        _LLAMA3
    ),
}
"""Pattern of a tokenizer.json -> those of llama.cpp that cut alike."""
_TRAILING = r"\z"
"""In a pattern that makes one word of the spaces that end a text."""


def tokenizer_metadata(found: ImportedModel, vocab_size: int) -> tuple[dict[str, Value], list[str]]:
    """Return the metadata of a model's tokenizer, and remarks for the user. ``vocab_size``: rows of the embedding.

    Raises:
        ConfigError: llama.cpp would make other ids of a text, or the token that ends a text is not known.
    """
    if not found.tokenizer:
        return {"tokenizer.ggml.model": "none"}, ["the export has no tokenizer: none is written"]
    if found.eos_id is None:
        problem = "is not known, and llama.cpp would take id 11 for it"
        raise ConfigError(explain("eos_token_id", None, problem, "set it in the export's config.json"))
    tokenizer = Tokenizer.from_json(found.tokenizer, TOKENIZER, found.eos_id)
    spec: dict[str, Any] = json.loads(tokenizer.to_json())
    model, added = spec["model"], spec.get("added_tokens") or []
    _check_model(model)
    _check_added(added)
    remarks = _normalizer_remarks(spec.get("normalizer"))
    pattern = _pattern(spec.get("pre_tokenizer"), model)
    pre = _chosen(_PRES[pattern], model) if model["merges"] else _Pre("gpt-2", False)
    if _TRAILING in pattern and "gpt-2" not in pre.name:
        remarks.append("llama.cpp cuts a text that ends in a line of spaces into other words than in training")
    tokens, types = _tokens(tokenizer, added, vocab_size)
    begin = _begin(tokenizer)
    told: dict[str, Value] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre.name,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [one if isinstance(one, str) else " ".join(one) for one in model["merges"]],
        "tokenizer.ggml.eos_token_id": found.eos_id,
        # llama.cpp takes id 11 where a file has none
        "tokenizer.ggml.bos_token_id": next(one for one in (begin, found.bos_id, found.eos_id) if one is not None),
        "tokenizer.ggml.add_bos_token": begin is not None,
    }
    return told | ({"tokenizer.chat_template": found.template} if found.template else {}), remarks


def _refusal(what: str, value: Any, problem: str) -> ConfigError:
    return ConfigError(explain(f"{TOKENIZER}: {what}", value, f"{problem}, and llama.cpp has no name for it", _REMEDY))


def _check_model(model: Mapping[str, Any]) -> None:
    if model.get("type") != "BPE":
        raise _refusal("model.type", model.get("type"), "is not a byte-level BPE")
    for key in ("byte_fallback", "continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(key):
            raise _refusal(f"model.{key}", model[key], "is not of a byte-level BPE")


def _check_added(added: Sequence[Mapping[str, Any]]) -> None:
    for one in added:
        odd = [key for key in ("single_word", "lstrip", "rstrip") if one.get(key)]
        if odd:
            raise _refusal("added_tokens", one.get("content"), f"has {odd[0]}")


def _normalizer_remarks(normalizer: Mapping[str, Any] | None) -> list[str]:
    if normalizer is None:
        return []
    if normalizer.get("type") != "NFC":
        raise _refusal("normalizer", normalizer.get("type"), "changes texts")
    return ["llama.cpp does not compose characters (NFC), as the tokenizer does: compose texts before"]


def _pattern(step: Mapping[str, Any] | None, model: Mapping[str, Any]) -> str:
    """Return the pattern that cuts texts into words. Raises ConfigError if llama.cpp does not have it."""
    steps = step.get("pretokenizers", [step]) if step is not None else []
    *before, last = steps or [{}]
    if last.get("type") != "ByteLevel":
        raise _refusal("pre_tokenizer", last.get("type"), "does not spell bytes as letters")
    if last.get("add_prefix_space"):
        raise _refusal("pre_tokenizer.add_prefix_space", True, "puts a space before a text")
    if last.get("use_regex", True):
        found: Any = PATTERNS["gpt2"] if not before else None
    elif not before and not model["merges"]:
        return PATTERNS["gpt2"]  # bytes that never merge are the same ids however a text is cut
    else:
        [split] = before if len(before) == 1 else [{}]
        isolated = (split.get("type"), split.get("behavior"), split.get("invert")) == ("Split", "Isolated", False)
        found = (split.get("pattern") or {}).get("Regex") if isolated else None
    if found not in _PRES:
        shown = str(found)[:80] if found else [one.get("type") for one in steps]
        raise _refusal("pre_tokenizer", shown, "cuts texts into words in a way of its own")
    return str(found)


def _chosen(pres: Sequence[_Pre], model: Mapping[str, Any]) -> _Pre:
    """Return the pattern that merges as ``model`` does. Raises ConfigError if none does."""
    whole_words = bool(model.get("ignore_merges"))
    for one in pres:
        if one.whole_words == whole_words:
            return one
    raise _refusal("model.ignore_merges", whole_words, "is not how llama.cpp merges after this pattern")


def _tokens(tokenizer: Tokenizer, added: Sequence[Mapping[str, Any]], vocab_size: int) -> tuple[list[str], list[int]]:
    """Return the spelling and the type of each row of the embedding; those without a token get a name that no text has."""
    words = {index: word for word, index in tokenizer.tokenizer.get_vocab(with_added_tokens=True).items()}
    types = dict.fromkeys(words, _NORMAL)
    types |= {one["id"]: _CONTROL if one.get("special") else _USER_DEFINED for one in added}
    taken = set(words.values())
    for index in range(vocab_size):
        if index not in words:
            name = f"[PAD{index}]"
            while name in taken:
                name = f"[{name}]"
            words[index] = name
    if len(words) > vocab_size:
        problem = f"has more ids than the {vocab_size} rows of the embedding"
        raise ConfigError(explain(TOKENIZER, len(words), problem, "use the tokenizer that the model was trained with"))
    return [words[index] for index in range(vocab_size)], [types.get(index, _UNUSED) for index in range(vocab_size)]


def _begin(tokenizer: Tokenizer) -> int | None:
    """Return the id that the tokenizer puts before a text; None if there is none. Raises ConfigError if it adds other ids."""
    plain = tokenizer.tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.tokenizer.encode("a", add_special_tokens=True).ids
    if whole == plain:
        return None
    if whole[1:] == plain:
        return int(whole[0])
    raise _refusal(
        "post_processor", [one for one in whole if one not in plain][:3], "adds more than one id before a text"
    )
