"""Read untrusted files in the folder of a model or an adapter. Each kind of file has a size limit. Also imports and exports
``generation_config.json``, which defines at which ids text generation stops."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from springtide.corpus.tokenizer_probe import MOST_BYTES, MOST_VALUES
from springtide.errors import ConfigError, explain, printable
from springtide.shards import TOKENIZER
from springtide.storage import Folder, most_values

CONFIG_BYTES = 2**20
"""Largest size of a config.json or adapter_config.json, in bytes."""
SETTINGS_BYTES = 4 * 2**20
"""Largest size of a tokenizer_config.json, in bytes. That of Gemma 3 has 1.2 MB, because it lists 6,000 unused tokens."""
COPY = "the file is damaged or hostile: download it again"


def read_file(folder: Folder, name: str, most_bytes: int) -> bytes:
    """Return the content of the file ``name``. Raises ConfigError if it is larger than ``most_bytes``, or if ``folder`` was
    opened with ``confined`` and the file is a link that leads out of it."""
    size = folder.size(name)
    if size > most_bytes:
        raise ConfigError(explain(folder.where(name), size, f"are more than {most_bytes:,} bytes", COPY))
    return folder.read(name)


def read_settings(folder: Folder, name: str, most_bytes: int = CONFIG_BYTES) -> dict[str, Any]:
    """Return the JSON object in the file ``name``. Raises the ConfigErrors of ``read_file`` and ``parsed``."""
    return parsed(read_file(folder, name, most_bytes), folder.where(name))


def read_tokenizer(folder: Folder) -> str:
    """Return the text of ``tokenizer.json``. Raises the ConfigErrors of ``read_file`` and ``check_values``."""
    data = read_file(folder, TOKENIZER, MOST_BYTES)
    check_values(data, folder.where(TOKENIZER), MOST_VALUES)
    return data.decode("utf-8", "replace")


def check_values(data: bytes, where: str, limit: int) -> None:
    """Raise ConfigError if JSON text may hold more than ``limit`` values. This limits memory: small values take 30 times the
    size of their text once parsed."""
    if (found := most_values(data)) > limit:
        raise ConfigError(explain(where, found, f"are more than {limit:,} values of JSON", COPY))


def parsed(data: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object in ``data``. Raises ConfigError if it is not a JSON object, or if a key occurs twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key is there twice")
        return found

    try:
        # decode first: given bytes, json.loads would also accept UTF-16, in which ``check_values`` cannot count values
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise ConfigError(explain(where, data[:40], f"is not JSON ({str(error)[:200]})", COPY)) from None
    if not isinstance(value, dict):
        raise ConfigError(explain(where, value, "is not a JSON object", COPY))
    return value


# ``generation_config.json`` of a model: the ids that end a text, and how tokens are sampled by default.
#
# The file is imported with a model, kept in the run's folder, and exported with models trained from it, so that
# transformers and vLLM stop at the same ids as ``springtide model generate``.

GENERATION = "generation_config.json"
_ENDS = "eos_token_id"
_MOST_ENDS = 64
"""Largest number of ids that end a text; released models have at most five."""
_FLAGS = ("do_sample",)
_NUMBERS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
_NOT_MISSED = (
    *("bos_token_id", "transformers_version", "_from_model_config", "max_length", "max_new_tokens"),
    *("output_attentions", "output_hidden_states", "use_cache", "cache_implementation"),
)
"""Keys that an import drops without a warning: an export writes its own value, or does not need them."""

_log = logging.getLogger(__name__)


def read_generation(folder: Folder, config: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the settings of ``generation_config.json`` that a run keeps, and log the keys that it drops. If the file is
    missing and ``config`` lists several ids that end a text, return these ids. If it lists fewer, return an empty dict.

    Args:
        folder: the model's folder, opened with ``confined`` (files cannot link out of it).
        config: the model's ``config.json``.
        vocab_size: number of rows of the model's embedding.

    Raises:
        ConfigError: the file is not a JSON object, or is too large.
    """
    found = read_settings(folder, GENERATION) if folder.exists(GENERATION) else {}
    kept: dict[str, Any] = {}
    ends = ids_of(found.get(_ENDS, config.get(_ENDS)), vocab_size)
    if len(ends) > 1 or (ends and found):
        kept[_ENDS] = list(ends)
    if padding := ids_of(found.get("pad_token_id"), vocab_size):
        kept["pad_token_id"] = padding[0]
    kept |= {key: found[key] for key in _FLAGS if isinstance(found.get(key), bool)}
    # keep the sampling numbers only with do_sample: without it transformers refuses to write them
    if kept.get("do_sample"):
        kept |= {key: found[key] for key in _NUMBERS if _is_number(found.get(key))}
    if left := [key for key in found if key not in kept and key not in _NOT_MISSED and found[key] is not None]:
        _log.warning("%s: left out %s", folder.where(GENERATION), printable(", ".join(map(str, left[:8]))))
    return kept


def written_generation(found: Mapping[str, Any], end_ids: Iterable[int], bos_id: int | None) -> dict[str, Any]:
    """Return the ``generation_config.json`` for an export. ``found``: the imported model's settings, from ``read_generation``;
    ``end_ids``: all ids that end a text or a turn."""
    ends = list(end_ids)
    ids = {"bos_token_id": bos_id, _ENDS: ends[0] if len(ends) == 1 else ends}
    return {**{key: value for key, value in found.items() if key != _ENDS}, **ids}


def ids_of(value: Any, vocab_size: int) -> tuple[int, ...]:
    """Return the ids in ``value``: one id, a list of ids or None. Leaves out ids without a row in the embedding."""
    several = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(one for one in several[:_MOST_ENDS] if type(one) is int and 0 <= one < vocab_size))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2**31
