"""Read files of a model's or an adapter's folder, which anybody may have made. Each kind of file has its limit."""

from __future__ import annotations

import json
from typing import Any

from springtide.corpus.tokenizer_probe import MOST_BYTES, MOST_VALUES
from springtide.errors import ConfigError, explain
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
