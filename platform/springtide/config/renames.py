"""Retired and renamed settings and commands, and what to use instead. The code has no other list of them.

What happens to such a setting depends on who wrote the config:

- A user: the setting is an error that names its replacement (``refused``). Only a retired setting at its default is dropped
  without an error (``without_defaults``).
- An earlier version of springtide, into the folder of a run or a sweep or into a checkpoint: a renamed setting is read under
  its new name, and a retired setting is dropped (``current``). So every command opens such a run. Only resuming its training is
  refused, and only if a retired setting changed the training and was not at its default (``lost``).

The identity of a run is a hash over the old names (``as_hashed``), so that a rename does not change it.
docs/decisions/renames.md lists these names for people.

Names are dotted: ``section.field``. In the name of a setting inside a table, ``*`` stands for every entry of the table or list,
as in ``corpus.sources.*.field``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from springtide.errors import explain


@dataclasses.dataclass(frozen=True)
class Retired:
    """A setting that no longer exists."""

    default: Any
    """Default that the setting had: a run with this value trains the same under this version. Written as in config.yaml: a
    list, not a tuple."""
    instead: str
    """What to use instead: the remedy of the error, such as ``prepare the new text, then resume with it in stream.mixture``."""
    changes_training: bool = False
    """True if values other than the default changed what was learned. This version then cannot resume a run with such a value.
    Never set it for a setting of ``model``: stored configs drop retired settings, so evaluation and export would silently build
    a different model."""
    is_free: bool = True
    """Whether the setting was free: it could change at a resume. A run's identity, a hash of settings, never included a free
    setting."""


RETIRED_SETTINGS: dict[str, Retired] = {
    "stream.follow": Retired("", "prepare each batch of new text, then resume with it in stream.mixture"),
    "optim.momentum": Retired(0.95, "leave it out: Muon's momentum is 0.95", True, False),
    "optim.spike_window": Retired(128, "leave it out: a step is compared with the 128 before it", True, False),
    "checkpoint.expected_loss": Retired(14400.0, "leave it out: four hours are assumed until the run has seen a loss"),
    "checkpoint.min_every": Retired(30.0, "leave it out, or name the steps: checkpoint.every_steps"),
    "checkpoint.max_every": Retired(1800.0, "leave it out, or name the steps: checkpoint.every_steps"),
    "track.retry": Retired(5.0, "leave it out: a tracking server that fails is tried again after 5 s"),
    "feed.cpus_per_read": Retired(0.0, "leave it out: a read reserves no CPU, so that it never waits for one"),
}
"""Dotted name -> facts about the retired setting."""

RENAMED_SETTINGS: dict[str, str] = {}
"""Old dotted name -> new dotted name, oldest rename first. A run's identity (hash of its settings) still uses the old name."""

ADDED_SETTINGS: dict[str, Any] = {
    "model.rope_short_factors": [],
    "model.rope_long_factors": [],
    "model.rope_attention_factor": 0.0,
    "train.parts": "",
}
"""Settings that were added after commit 0ba2dd87 and may not change at a resume: dotted name -> neutral value, as in a
config.yaml. With its neutral value, a setting trains as if it did not exist. A run's identity (hash of its settings) leaves
such a setting out, so that older runs keep their identity."""

RETIRED_COMMANDS: dict[str, str] = {
    "model serve": "springtide model export --to hf, then transformers serve or vLLM: docs/how-to/serve.md",
    "model evaluate --task-files": "lm_eval.simple_evaluate with springtide.eval.harness: docs/how-to/evaluate.md",
    "model evaluate --follow": "springtide model evaluate --tasks for each checkpoint, with --step",
    "model evaluate --processes": "one process: leave it out",
    "model export --to gguf": "springtide model export --to hf, then python examples/gguf/to_gguf.py",
    "model export --serve": "the YAML in docs/how-to/serve.md, for Ray Serve LLM",
    "data prepare --follow": "prepare each batch of new text, then resume with it in stream.mixture",
    "drill --scenario storm": "in the repository's tests/programs: python -m fault_points storm",
    "drill --scenario points": "in the repository's tests/programs: python -m fault_points cross",
    "drill --seed": "it was the seed of the storm: in the repository's tests/programs, python -m fault_points storm --seed N",
    "drill --only": "it chose points: in the repository's tests/programs, python -m fault_points cross --only PARTS",
    "doctor --peer": "measure links with nccl-tests (docs/how-to/slow.md), and each machine's clock with chronyc tracking",
    "metrics --out": "copy springtide-dashboard.json and springtide-alerts.yml from deploy/monitoring of the repository",
    "estimate": "springtide plan CONFIG --workers N",
    "simulate": "springtide plan --trace FILE, or --mttf H, with the same options",
    "data inspect": "springtide inspect DATASET",
    "run inspect": "springtide inspect RUN, or a checkpoint of it",
    "data label": "springtide data prepare CONFIG --label-by MODEL --label-what WHAT --label-out FOLDER",
    "model fisher": "springtide train CONFIG --train.start-from RUN --train.start-with weights --fisher-tokens N",
    "run why": "springtide run status RUN",
    "run watch": "springtide run status RUN --follow",
    "run note": "a file of your own beside the run, or the description of its MLflow run",
    "run list --out": "springtide run list ROOT, with --json for a page of your own",
    "report --serve": "reload RUN/report.html, which is written anew while a run trains; or springtide run status RUN --follow",
    "report --port": "reload RUN/report.html, which is written anew while a run trains; or springtide run status RUN --follow",
}
"""Retired command -> what to use instead. A key is a command (``model serve``), a command with an option (``run watch
--page``), or also with the option's value (``model export --to gguf``)."""


def current(stored: Any) -> Any:
    """Return a config that an earlier version stored, under today's names and without retired settings.

    Args:
        stored: config as nested dicts and lists; a value that is not a dict is returned unchanged.

    Examples:
        >>> current({"run": {"id": "mine"}})
        {'run': {'id': 'mine'}}
    """
    if not isinstance(stored, dict):
        return stored
    return _without_retired(_renamed(stored), stored, at_default=False)


def without_defaults(given: Any) -> Any:
    """Return a user's config without the retired settings that are at their defaults. Dropping them does not change training.
    A copy of a run's config.yaml lists every setting, also those that are retired now. Without this step it would be refused.

    Args:
        given: config as nested dicts and lists; a value that is not a dict is returned unchanged.

    Examples:
        >>> without_defaults({"optim": {"momentum": 0.95, "peak_lr": 0.001}})
        {'optim': {'peak_lr': 0.001}}
    """
    if not isinstance(given, dict):
        return given
    return _without_retired(copy.deepcopy(given), given, at_default=True)


def _without_retired(data: dict[str, Any], before: dict[str, Any], at_default: bool) -> dict[str, Any]:
    """Return ``data`` without retired settings, and without sections that became empty. ``before``: the config before any
    change; ``at_default``: remove only the retired settings that are at their defaults."""
    for name, was in RETIRED_SETTINGS.items():
        for _, table, key in list(_places(data, name)):
            if not at_default or table[key] == was.default:
                del table[key]
    # drop a section that lost all its fields: if this version has no such section, an empty one would be an error
    return {section: fields for section, fields in data.items() if fields or not before.get(section)}


def refused(given: Any) -> list[str]:
    """Return an error message for each retired or renamed setting in a config that a user wrote.

    Args:
        given: config as nested dicts and lists.
    """
    return [
        explain(path, table[key], *found)
        for name in (*RENAMED_SETTINGS, *RETIRED_SETTINGS)
        if (found := limit_and_remedy(name))
        for path, table, key in _places(given, name)
    ]


def lost(stored: Any) -> list[str]:
    """Return an error message for each retired setting that prevents resuming a stored run. Such a setting changed the training
    and is not at its default. This version would ignore the setting and train something else.

    Args:
        stored: config as nested dicts and lists, as an earlier version wrote it.
    """
    data = _renamed(stored)
    return [
        explain(path, table[key], "changed the training and is retired", was.instead)
        for name, was in RETIRED_SETTINGS.items()
        if was.changes_training
        for path, table, key in _places(data, name)
        if table[key] != was.default
    ]


def limit_and_remedy(name: str) -> tuple[str, str] | None:
    """Return why a setting is refused, and what to use instead; None if the setting is neither retired nor renamed.

    Args:
        name: dotted name, with ``*`` in place of the entries of a table.
    """
    newest = newest_name(name)
    if newest in RETIRED_SETTINGS:
        return "is retired", RETIRED_SETTINGS[newest].instead
    return ("is renamed", f"use {newest}") if newest != name else None


def newest_name(name: str) -> str:
    """Return today's name of a setting.

    >>> newest_name("optim.peak_lr")
    'optim.peak_lr'
    """
    while name in RENAMED_SETTINGS:
        name = RENAMED_SETTINGS[name]
    return name


def as_hashed(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings in the form that they had at commit 0ba2dd87. The identity of a run is a hash of this form. Renamed
    settings get their oldest names. Retired settings that were part of the identity are set to their defaults. Settings added
    since are left out if their value does not change training.

    Args:
        settings: section -> field -> plain value, for the fields that are not free (that must not change at a resume).

    Examples:
        >>> as_hashed({"optim": {"peak_lr": 0.001}})["optim"]["peak_lr"]
        0.001
    """
    data = copy.deepcopy(settings)
    for name, neutral in ADDED_SETTINGS.items():
        for _, table, key in list(_places(data, name)):
            if table[key] == neutral:
                del table[key]
    for name, was in RETIRED_SETTINGS.items():
        if not was.is_free:
            section, _, key = name.rpartition(".")
            if "." not in section:
                data.setdefault(section, {})
            for _, table in _tables(data, section):
                table[key] = was.default
    for old, new in reversed(RENAMED_SETTINGS.items()):
        for _, table, key in list(_places(data, new)):
            _put(data, old, table, table.pop(key))
    return data


def replaces_command(words: Sequence[str]) -> str:
    """Return an error message if ``words`` contain a retired command, or a retired option of a command; else an empty text.

    Args:
        words: the words of the command line after ``springtide``.
    """
    given = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for retired, instead in RETIRED_COMMANDS.items():
        command, dashes, option = retired.partition(" --")
        names, wanted = command.split(), f"{dashes[1:]}{option}".split()
        rest = given[len(names) :]
        has_option = any(rest[at : at + len(wanted)] == wanted for at in range(len(rest) + 1))
        if given[: len(names)] == names and has_option:
            return explain("command", retired, "is retired", instead)
    return ""


def _renamed(stored: Any) -> Any:
    data = copy.deepcopy(stored)
    for old, new in RENAMED_SETTINGS.items():
        for _, table, key in list(_places(data, old)):
            _put(data, new, table, table.pop(key))
    return data


def _tables(data: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (path, table) for each table (dict) in ``data`` at the dotted ``path``; a ``*`` in it matches every entry of a
    table or list."""
    found = [("", data)]
    for part in path.split("."):
        found = [
            (f"{before}{key}.", value)
            for before, table in found
            for key, value in _entries(table)
            if part in ("*", str(key))
        ]
    yield from ((where, table) for where, table in found if isinstance(table, dict))


def _entries(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list):
        yield from enumerate(value)


def _places(data: Any, name: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield (dotted name, table, key) for each occurrence of the setting ``name`` in ``data``."""
    section, _, key = name.rpartition(".")
    yield from ((f"{where}{key}", table, key) for where, table in _tables(data, section) if key in table)


def _put(data: dict[str, Any], name: str, beside: dict[str, Any], value: Any) -> None:
    """Set the setting ``name`` to ``value`` if it has no value yet. ``beside``: the table that held the old name. A name with
    ``*`` is set in ``beside``, any other name in its section of ``data``."""
    section, _, key = name.rpartition(".")
    table = beside if "*" in section else data.setdefault(section, {})
    if isinstance(table, dict):
        table.setdefault(key, value)
