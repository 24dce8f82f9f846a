"""The config file that ``springtide init`` writes: the settings that people change most, each with its description."""

from __future__ import annotations

import json
import textwrap

from springtide.config.fields import USUAL, fields
from springtide.config.files import flatten
from springtide.config.recipes import tiny
from springtide.config.schema import Config

_ALSO = ("corpus.max_files", "stream.max_epochs", "model.num_kv_heads", "model.ffn_dim")
"""Settings to write besides ``USUAL``: the recipe tiny changes them, and a user's own text or model needs other values."""
_HEAD = """\
# A config of springtide. It trains as it is, in seconds:
#   springtide train {name} --dry-run    # decides everything, trains nothing
#   springtide train {name}
# What it leaves out is the recipe's. All settings: springtide train --help-all
recipe: tiny
"""
_WIDTH = 110


def starter(name: str) -> str:
    """Return the text of a config file that trains the recipe tiny, with a comment above each setting.

    Args:
        name: name of the file, for the commands in its comments.
    """
    values, lines, section = flatten(tiny()), [_HEAD.format(name=name)], ""
    for setting in (one for one in fields() if one in USUAL or one in _ALSO):
        above, _, field = setting.partition(".")
        if above != section:
            lines += [f"\n# {Config.model_fields[above].description}\n{above}:\n"]
            section = above
        about = " ".join(fields()[setting].description.split()).replace("``", "`")
        lines += [f"  # {line}\n" for line in textwrap.wrap(about, _WIDTH, break_on_hyphens=False)]
        lines.append(f"  {field}: {json.dumps(values[setting], allow_nan=False)}\n")
    return "".join(lines)
