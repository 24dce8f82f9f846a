"""The scenarios of a drill: what happens to the nodes, when, and the run that it happens to."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from springtide import config as configs
from springtide.app.fault_watch import name_of
from springtide.app.simulate import read_trace
from springtide.app.stage import NOTICE_S, Act
from springtide.config import Config
from springtide.elastic.traces import smaller
from springtide.errors import ConfigError, explain
from springtide.faults import POINTS, When

_TRACE_NODES = 4
_STEPS_BETWEEN = 100
"""Average number of steps between two changes of a trace."""
_OF_A_RESTART = tuple(
    name_of(point, when) for point in POINTS if point not in ("replicate", "commit") for when in get_args(When)
)
"""Names of the fault points that are passed when a group ends or forms."""
_IN_RESTART = 0.8
"""Share of the faults after a kill or a hang that come in the restart."""
_SHORTEST_NOTICE_S, _LONGEST_NOTICE_S = 8.0, 600.0
_ENDLESS = 100_000


@dataclasses.dataclass(frozen=True)
class Scenario:
    """The plan of a drill."""

    workers: int
    acts: tuple[Act, ...]
    steps: int
    about: str
    most: int = 0
    """Most workers, if more than ``workers`` at the start."""
    steps_after: int = 0
    """Stop this many steps after all of it has happened, however long that takes; 0: train all ``steps``."""
    strategy: str = "zero3"
    """As parallel.strategy."""

    @property
    def max_workers(self) -> int:
        """Most workers at any time."""
        return max(self.workers, self.most)


def storm(seed: int, faults: int) -> Scenario:
    """Return random faults, with joins between them; the cluster never loses its last node. Most faults that follow a kill or a
    hang come at a fault point of the restart which that causes: while no group trains."""
    chance = random.Random(seed)
    nodes, acts, step, left = 3, list[Act](), 20, faults
    while left:
        kinds = ["hang", "kill", "drain"] if nodes > 1 else ["hang"]
        what = "add" if nodes == 1 or (nodes < 3 and chance.random() < 0.5) else chance.choice(kinds)
        left -= what != "add"
        nodes += {"add": 1, "kill": -1, "drain": -1, "hang": 0}[what]
        in_restart = what != "add" and acts and acts[-1].what in ("kill", "hang") and chance.random() < _IN_RESTART
        at = chance.choice(_OF_A_RESTART) if in_restart else ""
        acts.append(Act(acts[-1].step if at else step, what, at=at))
        step += chance.randrange(1, 30)
    return Scenario(3, tuple(acts), step + 40, f"{faults} faults at random, seed {seed}")


def with_notice(notice_s: float) -> Scenario:
    """Return a notice of ``notice_s``, and the loss. Raises ConfigError if that is too short or too long."""
    if not _SHORTEST_NOTICE_S <= notice_s <= _LONGEST_NOTICE_S:
        limits = f"is not from {_SHORTEST_NOTICE_S:g} to {_LONGEST_NOTICE_S:g} s"
        raise ConfigError(explain("--notice", notice_s, limits, "give what your cloud gives, as 30 or 120"))
    about = f"a node is announced to leave in {notice_s:g} s, and leaves"
    return Scenario(3, (Act(40, "drain", workers=3, notice_s=notice_s),), _ENDLESS, about, steps_after=40)


def traced(_: int, changes: int, trace: str) -> Scenario:
    """Return the first ``changes`` of a record of spot capacity, scaled to a few nodes and a short run. Raises ConfigError if
    the record has no change."""
    numbers = smaller(read_trace(trace), _TRACE_NODES)[: changes + 1]
    if len(numbers) < 2:
        raise ConfigError(explain("--trace", trace, "has no change of the number of nodes", "give another record"))
    (begin_s, here), (end_s, _) = numbers[0], numbers[-1]
    first, acts = here, []
    for time_s, number in numbers[1:]:
        step = 20 + round((time_s - begin_s) / (end_s - begin_s) * _STEPS_BETWEEN * len(numbers))
        acts.append(Act(step, "add" if number > here else "drain", abs(number - here)))
        here = number
    about = f"{len(acts)} changes of {Path(trace).name}, on at most {_TRACE_NODES} nodes"
    return Scenario(first, tuple(acts), acts[-1].step + 60, about, most=_TRACE_NODES)


SCENARIOS: dict[str, Callable[..., Scenario]] = {
    "kill": lambda *_: Scenario(3, (Act(40, "kill"),), 100, "a node and all its processes are killed"),
    "drain": lambda *_: with_notice(NOTICE_S),
    "copies": lambda *_: Scenario(
        4,
        (Act(40, "kill-copies", workers=4),),
        100,
        "a node and the node with the copy of its snapshots are killed at once; the others have the state on their devices",
        strategy="ddp",
    ),
    "regrow": lambda *_: Scenario(3, (Act(40, "kill"), Act(60, "add")), 260, "a node is killed, another one joins"),
    "hang": lambda *_: Scenario(
        3, (Act(40, "hang", workers=3),), 60, "a worker's process is stopped and does not answer"
    ),
    "resize": lambda *_: Scenario(
        8,
        (Act(15, "drain", 3, 8), Act(35, "add", 2, 5), Act(60, "add", 1, 7), Act(80, "kill", 1, 8)),
        230,
        "8 -> 5 -> 7 -> 8 -> 7 workers: three leave with a notice, two join, another joins, one leaves without",
    ),
    "all": lambda *_: Scenario(
        3, (Act(15, "drain"), Act(60, "kill"), Act(80, "add")), 320, "one leaves with a notice, one without, one joins"
    ),
    "storm": lambda seed, faults, _: storm(seed, faults),
    "trace": traced,
}


def config_of(scenario: Scenario, root: str) -> Config:
    """Return the tiny recipe at the size of the drill, with exact sums, so that any error of a resize shows in the losses."""
    base = configs.recipes.tiny()
    rows = 24
    changes = {
        "run.root": root,
        "shards.root": f"{root}/datasets",
        "model.num_layers": 2,
        "model.dim": 64,
        "model.ffn_dim": 176,
        "stream.global_batch": rows,
        "stream.max_epochs": 1e6,  # nobody uses the model
        "stream.lanes": 12 if scenario.workers > 4 else 4,
        "parallel.reduction": "fp64",
        "parallel.strategy": scenario.strategy,
        "parallel.threads": 1,
        "elastic.min_workers": 1,
        "elastic.max_workers": scenario.max_workers,
        "elastic.grow": "always",
        "elastic.hang": 15.0,
        "elastic.notices": "file",
        "elastic.notice_file": f"{root}/notice-{{node}}",
        "train.total": scenario.steps * rows * base.shards.sequence_length,
        "checkpoint.memory_every": 1,
        "train.eval_tokens": 0,
        "train.sample_tokens": 0,
        "track.mlflow_uri": "off",
        "track.progress": False,
    }
    return base.override(changes)
