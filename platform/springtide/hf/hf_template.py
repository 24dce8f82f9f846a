"""The chat template of a model's folder: text, taken as it is. Whoever lays out a chat by it does so in the sandbox."""

from __future__ import annotations

from typing import Any

from springtide.corpus import TEMPLATE_BYTES
from springtide.errors import ConfigError, explain
from springtide.hf.hf_files import SETTINGS_BYTES, read_file, read_settings
from springtide.hf.hf_tokenizer import SETTINGS
from springtide.shards import CHAT_TEMPLATE
from springtide.storage import Folder

_DEFAULT, _KEY = "default", "chat_template"
_REMEDY = "correct the file, or remove the template from it"


def their_template(folder: Folder) -> str:
    """Return the chat template of a folder of transformers: ``chat_template.jinja``, or that of ``tokenizer_config.json``, of
    several the one that is named default; empty if there is none.

    Raises:
        ConfigError: it is not text, too large, or a link that leads out of the folder.
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
    except UnicodeEncodeError:  # half of a surrogate pair
        size = -1
    if size < 0:
        raise ConfigError(explain(where, str(found)[:100], "is not the text of a template", _REMEDY))
    if size > TEMPLATE_BYTES:
        raise ConfigError(explain(where, size, f"are more than {TEMPLATE_BYTES:,} bytes", _REMEDY))
    return str(found)


def _default(value: Any) -> Any:
    """Return the template that is the default of several, as older tokenizers list them: tables of name and template."""
    if not isinstance(value, list):
        return value
    named = [one.get("template") for one in value if isinstance(one, dict) and one.get("name") == _DEFAULT]
    return named[0] if named else None
