"""Read files of a model's or an adapter's folder, which anybody may have made. Each kind of file has its limit. And
``generation_config.json``: how generation stops, in and out."""

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
"""Largest config.json and adapter_config.json."""
SETTINGS_BYTES = 4 * 2**20
"""Largest tokenizer_config.json. Those of Gemma 3 have 1.2 MB: they list 6,000 unused tokens."""
COPY = "the file is damaged or hostile: download it again"


def read_file(folder: Folder, name: str, most_bytes: int) -> bytes:
    """Return the content of the file ``name``. Raises ConfigError if it is larger than ``most_bytes``, or is a link out of a
    confined ``folder``."""
    size = folder.size(name)
    if size > most_bytes:
        raise ConfigError(explain(folder.where(name), size, f"are more than {most_bytes:,} bytes", COPY))
    return folder.read(name)


def read_settings(folder: Folder, name: str, most_bytes: int = CONFIG_BYTES) -> dict[str, Any]:
    """Return the JSON object in ``name``. Raises ConfigError as ``read_file`` and ``parsed``."""
    return parsed(read_file(folder, name, most_bytes), folder.where(name))


def read_tokenizer(folder: Folder) -> str:
    """Return the text of ``tokenizer.json``. Raises ConfigError as ``read_file`` and ``check_values``."""
    data = read_file(folder, TOKENIZER, MOST_BYTES)
    check_values(data, folder.where(TOKENIZER), MOST_VALUES)
    return data.decode("utf-8", "replace")


def check_values(data: bytes, where: str, limit: int) -> None:
    """Raise ConfigError if JSON text may hold more than ``limit`` values: parsed, small ones take 30 times their text."""
    if (found := most_values(data)) > limit:
        raise ConfigError(explain(where, found, f"are more than {limit:,} values of JSON", COPY))


def parsed(data: bytes, where: str) -> dict[str, Any]:
    """Return a JSON object in which no key is given twice. Raises ConfigError if it is none."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key is there twice")
        return found

    try:
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=once)  # UTF-8 only: its values were counted so
    except (ValueError, RecursionError) as error:
        raise ConfigError(explain(where, data[:40], f"is not JSON ({str(error)[:200]})", COPY)) from None
    if not isinstance(value, dict):
        raise ConfigError(explain(where, value, "is not a JSON object", COPY))
    return value


# ``generation_config.json`` of a model: the ids that end a text, and how its tokens are drawn by default.
#
# It comes in with a model, lies in the run's folder, and goes out with what is trained from it, so that transformers and vLLM
# stop where ``model generate`` does.

GENERATION = "generation_config.json"
_ENDS = "eos_token_id"
_MOST_ENDS = 64
"""Most ids that end a text; released models have at most five."""
_FLAGS = ("do_sample",)
_NUMBERS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
_NOT_MISSED = (
    *("bos_token_id", "transformers_version", "_from_model_config", "max_length", "max_new_tokens"),
    *("output_attentions", "output_hidden_states", "use_cache", "cache_implementation"),
)
"""Keys that do not come in, and that an export has of its own or does not need."""

_log = logging.getLogger(__name__)


def read_generation(folder: Folder, config: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the settings of ``generation_config.json`` that are kept; without one, the ids of several that end a text in
    ``config``. Logs the keys that are left out.

    Args:
        folder: of the model, confined.
        config: its ``config.json``.
        vocab_size: rows of its embedding.

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
    if kept.get("do_sample"):  # without it transformers refuses to write them
        kept |= {key: found[key] for key in _NUMBERS if _is_number(found.get(key))}
    if left := [key for key in found if key not in kept and key not in _NOT_MISSED and found[key] is not None]:
        _log.warning("%s: left out %s", folder.where(GENERATION), printable(", ".join(map(str, left[:8]))))
    return kept


def written_generation(found: Mapping[str, Any], end_ids: Iterable[int], bos_id: int | None) -> dict[str, Any]:
    """Return the ``generation_config.json`` of an export. ``found``: as ``read_generation`` returns it, of the model that was
    imported; ``end_ids``: all that end a text or a turn."""
    ends = list(end_ids)
    ids = {"bos_token_id": bos_id, _ENDS: ends[0] if len(ends) == 1 else ends}
    return {**{key: value for key, value in found.items() if key != _ENDS}, **ids}


def ids_of(value: Any, vocab_size: int) -> tuple[int, ...]:
    """Return the ids of a key that may hold one, several or none; those that are no rows of the embedding are left out."""
    several = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(one for one in several[:_MOST_ENDS] if type(one) is int and 0 <= one < vocab_size))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2**31
