"""A run that starts from another run's checkpoint: remarks on changed settings, and the checkpoints that it descends from."""

from __future__ import annotations

from springtide import config as configs
from springtide.checkpoint.branch import split
from springtide.config import RUN_CONFIG, Config
from springtide.run.find import config_or_problem
from springtide.run.folder import Run

_SAME_FUNCTION = ("model.init_seed", "model.max_sequence_length")
"""Model settings that do not change the outputs that given weights compute."""
_ADAPTER = "model.adapter"


def remarks_on(saved: Config, config: Config) -> list[str]:
    """Return remarks for the user about a run that starts from a checkpoint. There is one for each changed model setting with
    which the same weights compute other outputs.

    A new adapter and new blocks get no remark, because they change no output before they are trained. A setting that changes
    the shape of a weight gets an error later, when the weights are loaded. ``saved``: config of the checkpoint; ``config``:
    config of the new run.
    """
    adds = saved.model.adapter == "none"
    known = {*_SAME_FUNCTION, *(("model.num_layers",) if config.train.new_blocks else ())}
    return [
        f"{name} was {before!r} in {config.train.start_from} and is {after!r} here: its weights compute something else"
        for name, (before, after) in configs.difference(saved, config).items()
        if name.startswith("model.") and name not in known and not (adds and name.startswith(_ADAPTER))
    ]


def lineage(config: Config) -> list[str]:
    """Return the URLs of the checkpoints that a run of ``config`` descends from: the checkpoint that it starts from, then the
    one that the first one's run started from, and so on. The list ends at a run that is gone or cannot be read."""
    found: list[str] = []
    url = config.train.start_from
    while url and url not in found:
        found.append(url)
        run = Run(split(url)[0])
        before, _ = config_or_problem(run) if run.folder.exists(RUN_CONFIG) else (None, "")
        url = before.train.start_from if before else ""
    return found
