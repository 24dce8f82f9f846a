"""What the user of a run that starts from a checkpoint of another run should know."""

from __future__ import annotations

from springtide import config as configs
from springtide.checkpoint.branch import split
from springtide.config import RUN_CONFIG, Config
from springtide.run.find import config_or_problem
from springtide.run.folder import Run

_SAME_FUNCTION = ("model.init_seed", "model.max_sequence_length")
"""Model settings that do not change what the same weights compute."""
_ADAPTER = "model.adapter"


def remarks_on(saved: Config, config: Config) -> list[str]:
    """Return remarks for the user of a run of ``config`` that begins with a checkpoint saved with ``saved``: one for
    each model setting that makes its weights compute something else. Loading refuses settings that change a shape. A new
    adapter adds nothing before it is trained, and neither do new blocks."""
    adds = saved.model.adapter == "none"
    known = {*_SAME_FUNCTION, *(("model.num_layers",) if config.train.new_blocks else ())}
    return [
        f"{name} was {before!r} in {config.train.start_from} and is {after!r} here: its weights compute something else"
        for name, (before, after) in configs.difference(saved, config).items()
        if name.startswith("model.") and name not in known and not (adds and name.startswith(_ADAPTER))
    ]


def lineage(config: Config) -> list[str]:
    """Return the URLs of the checkpoints that a run of ``config`` descends from, latest first, as far as their runs exist and
    can be read."""
    found: list[str] = []
    url = config.train.start_from
    while url and url not in found:
        found.append(url)
        run = Run(split(url)[0])
        before, _ = config_or_problem(run) if run.folder.exists(RUN_CONFIG) else (None, "")
        url = before.train.start_from if before else ""
    return found
