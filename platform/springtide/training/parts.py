"""All parts of training (features that hook into its steps), in the order in which step and loop call them. Each part is one
file and one line here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from springtide.checkpoint.snapshots import Snapshotter
from springtide.config.code import PARTS, find_code
from springtide.distributed import on_first
from springtide.errors import ConfigError, explain
from springtide.stream import Data
from springtide.training.anchor import Anchor
from springtide.training.checkpoint_schedule import CheckpointSchedule
from springtide.training.compile_cache import CompiledCode, Recompiles
from springtide.training.data_waits import DataWaits
from springtide.training.device_check import StragglerDetector
from springtide.training.energy import energy_meter
from springtide.training.evaluate import Evaluations
from springtide.training.handover import Handover
from springtide.training.part import Part
from springtide.training.pauses import Pauses, check_can_tell, sensors
from springtide.training.profile import Profile, tools_of
from springtide.training.recheck import Recheck
from springtide.training.sample import Closing
from springtide.training.snapshot_schedule import SnapshotSchedule
from springtide.training.source_figures import SourceFigures
from springtide.training.step_guard import StepGuard
from springtide.training.step_metrics import StepMetrics
from springtide.training.weight_average import WeightAverage

if TYPE_CHECKING:
    from springtide.training.loop import TrainLoop


def parts_of(loop: TrainLoop) -> list[Part]:
    """Return the parts (features of a step) of a worker group. All ranks call it together, after ``loop`` has made its model
    and optimizer and before the first step."""
    config, world, state, context = loop.config, loop.world, loop.state, loop.context

    def data() -> Data:
        return loop.data

    def snapshotter() -> Snapshotter | None:
        checkpoint = config.checkpoint
        if loop.snapshot_store is None or not checkpoint.memory_every or not checkpoint.stage:
            return None
        is_aborted = world.aborted.is_set
        return Snapshotter(loop.snapshot_store, loop.lease.term, world.rank, world.size, checkpoint.stage, is_aborted)

    saves = CheckpointSchedule(
        config, world, loop.folder, loop.lease, loop.requests, loop.checkpoint, context.heartbeat
    )
    snapshots = SnapshotSchedule(config.checkpoint, snapshotter, loop.checkpoint, world.is_first)
    evaluations = Evaluations(config, data, world, state, context.heartbeat)
    names, only_when = config.train.metrics, config.train.only_when
    if only_when:
        on_first(lambda: check_can_tell(only_when, sensors()))
    return [
        loop.requests,  # first: the parts after it read the requests (to save, stop or leave) in the same step
        energy_meter(world),
        WeightAverage(config, state),
        *([loop.teacher] if loop.teacher else ()),
        *([StepMetrics(names, state.model, world)] if names else ()),
        *([Anchor(state.model, config, world.is_first_copy)] if config.objective.anchor else ()),
        SourceFigures(data, world.device),
        Recheck(config, world, state, context.nodes, saves, loop.lease, loop.seed),
        Recompiles(config.parallel.compile),
        CompiledCode(context.compiled, world, loop.lease),
        StepGuard(config, loop.loss_scale),
        Profile(config.train.profile, world, loop.folder, tools_of(world.device)),
        evaluations,
        saves,
        snapshots,
        Handover(world, loop.lease, state, saves, snapshots, context.time_to_leave_s),
        StragglerDetector(world, context.nodes, float(config.elastic.compare)),
        *([Pauses(only_when, world, loop.requests, context.heartbeat)] if only_when else ()),
        DataWaits(world, saves),
        Closing(config, data, world, state, evaluations),
        *own_parts(loop),
    ]


def own_parts(loop: TrainLoop) -> list[Part]:
    """Return the user's own parts, made by the code that ``train.parts`` names; none if the field is empty. Raises ConfigError
    if that code raises or returns anything other than parts."""
    source = loop.config.train.parts
    if not source:
        return []
    try:
        found = find_code(PARTS, source)(loop)
        parts = list(found) if isinstance(found, Iterable) else [found]
    except ConfigError:
        raise
    except Exception as error:
        problem = f"raises {type(error).__name__}: {error}"
        raise ConfigError(explain(PARTS, source, problem, "call that code in Python to see where")) from error
    own: list[Part] = []
    for part in parts:
        if not isinstance(part, Part):
            problem = f"returned a {type(part).__name__}"
            raise ConfigError(explain(PARTS, source, problem, "return one springtide.training.Part or several"))
        own.append(part)
    return own
