"""Resolve the paths of a config: look up inputs next to the config file and in the current folder, and expand ``$HOME``.

    input named in a config file     in the current folder, or next to the config file; refused if both have a different file
    input named by a shell option    in the current folder
    output, such as run.root         in the current folder
    $HOME or ${HOME} at the start    becomes ~; another $NAME is refused, because it would be taken as a literal folder name

Inputs of ``corpus`` are recorded as the user typed them: they are part of a dataset's identity (hash), which should not depend
on the folder of the config. ``CorpusConfig.path`` returns the path to open.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from typing import Any

from springtide.config.data import CHAT_TOKENS, MODEL_TEMPLATE
from springtide.config.objective import L2SP
from springtide.errors import ConfigError, explain

_TEMPLATES = frozenset({*CHAT_TOKENS, "plain", MODEL_TEMPLATE})
_INPUTS: dict[str, frozenset[str]] = {
    "corpus.source": frozenset({"stdlib"}),
    "corpus.sources.*": frozenset({"stdlib"}),
    "corpus.sources.*.source": frozenset({"stdlib"}),
    "corpus.sources.*.chat_template": _TEMPLATES,
    "corpus.apart_from.*": frozenset({"stdlib"}),
    "corpus.apart_from.*.source": frozenset({"stdlib"}),
    "corpus.tokenizer": frozenset({"bpe", "bytes"}),
    "corpus.chat_template": _TEMPLATES,
    "shards.dataset": frozenset(),
    "stream.mixture.*": frozenset(),
    "stream.eval_datasets.*": frozenset(),
    "objective.labels": frozenset(),
    "objective.teacher": frozenset(),
    "objective.anchor": frozenset({L2SP}),
    "train.start_from": frozenset(),
}
"""Setting that names an input file or folder -> its values that are keywords, not paths, such as ``stdlib``. ``*`` stands for
every entry of a table or a list."""
_OUTPUTS = ("run.root", "shards.root", "track.mlflow_uri")
_CORPUS = "corpus."
_HOME = re.compile(r"\$(?:HOME\b|\{HOME\})")
_VARIABLE = re.compile(r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})")
_PATTERN = re.compile(r"[*?\[]")


def expand_home(data: Any) -> None:
    """Replace ``$HOME`` at the beginning of each path in a config by ``~``, in place. Raises ConfigError for any other variable
    such as ``$DATA``, unless a file of that name exists.

    Args:
        data: config as nested dicts and lists, or a part of it.

    Examples:
        >>> data = {"run": {"root": "$HOME/runs"}}
        >>> expand_home(data)
        >>> data
        {'run': {'root': '~/runs'}}
    """
    for name in (*_INPUTS, *_OUTPUTS):
        for where, holder, key, value in _texts(data, name):
            path = _HOME.sub("~", value, count=1) if _HOME.match(value) else value
            if (found := _VARIABLE.search(path)) and not os.path.exists(path):
                limit = f"{found[0]} is not replaced; only $HOME is, at the beginning"
                raise ConfigError(explain(where, value, limit, f"write out what {found[0]} stands for"))
            holder[key] = path


def look_beside(data: Any, folder: str) -> dict[str, str]:
    """Replace each input that exists only in the folder of the config file by its absolute path, in place. Inputs of ``corpus``
    are not replaced but returned.

    Args:
        data: config as nested dicts and lists.
        folder: the folder of the config file.

    Returns:
        Input of ``corpus`` as the user typed it -> its absolute path, for inputs that exist only in ``folder``.

    Raises:
        ConfigError: an input exists in ``folder`` and in the current folder, as two different files.
    """
    of_corpus: dict[str, str] = {}
    for name, others in _INPUTS.items():
        for where, holder, key, value in _texts(data, name):
            if value in others or (path := find_input(where, value, folder)) == value:
                continue
            if name.startswith(_CORPUS):
                of_corpus[value] = path
            else:
                holder[key] = path
    return of_corpus


def find_input(field: str, typed: str, folder: str) -> str:
    """Return the path to open for an input that a config file names. The path is absolute if the input exists only in the
    file's folder; otherwise it is ``typed``, unchanged.

    Args:
        field: name of the setting that holds the path, for the error.
        typed: a path, a pattern of paths, or a URL; a URL is returned unchanged.
        folder: the folder of the file.

    Raises:
        ConfigError: the input exists in the file's folder and in the current folder, as two different files.
    """
    beside = os.path.abspath(os.path.join(folder, typed))
    if not typed or ":" in typed or typed.startswith(("~", "/")) or "\0" in typed or not _exists(beside):
        return typed
    if not _exists(typed):
        return beside
    is_same = os.path.realpath(beside) == os.path.realpath(typed)
    if not is_same:
        limit = f"is in the current folder, {os.path.abspath(typed)}, and beside the file, {beside}"
        raise ConfigError(explain(field, typed, limit, "give the absolute path of the one that you mean"))
    return typed


def _exists(path: str) -> bool:
    return os.path.exists(path) or (bool(_PATTERN.search(path)) and next(glob.iglob(path, recursive=True), "") != "")


def _texts(data: Any, name: str) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield (dotted name, table or list, key, text) for each text in ``data`` whose dotted name matches ``name``; ``*`` in
    ``name`` stands for every entry."""
    found = [("", data)]
    *above, last = name.split(".")
    for part in above:
        found = [(f"{where}{key}.", one[key]) for where, one in found for key in _keys(one, part)]
    for where, one in found:
        for key in _keys(one, last):
            if isinstance(one[key], str):
                yield f"{where}{key}", one, key, one[key]


def _keys(data: Any, part: str) -> list[Any]:
    """Return the keys or indexes of ``data`` that match ``part``, one part of a dotted name; ``*`` matches all."""
    if isinstance(data, dict):
        return list(data) if part == "*" else [part] * (part in data)
    return list(range(len(data))) if isinstance(data, list) and part == "*" else []
