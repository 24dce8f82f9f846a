"""All private parts of Ray that this package uses.

The other files import them from here. ``tests/unit/ray/test_ray_contract.py`` compares what these files rely on (names,
signatures, fields) with the installed Ray. ``docs/how-to/upgrade-ray.md`` is the recipe for a new version of Ray. Ray's modules
are imported on first use, because some processes need little of Ray and must start in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.data import DataContext, ExecutionResources
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

SUPPORTED = ((2, 60), (2, 61))
"""Supported versions of Ray: the first one and later, but below the second one."""
PREEMPTION = 2
"""Value of ``DrainNodeReason`` in Ray's autoscaler.proto that means: the node is taken away at a deadline."""
MARKET_LABEL = "ray.io/market-type"
"""A node's label that says whether it is a spot node."""
HEAD = "node:__internal_head__"
"""Name of a resource that only the head node has."""
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Environment variable that makes Ray's processes listen on the loopback address, also on Linux."""
OWN_ACTORS = {
    "TrainStateActor",
    "_StatsActor",
    "AutoscalingRequester",
    "AutoscalingCoordinator",
    "_AutoscalingCoordinatorActor",
    "_UsageCollectionActor",
}
"""Class names of actors that Ray starts for itself."""

_TRAIN = "ray.train.v2._internal"
_EXECUTION = f"{_TRAIN}.execution"
CONTROLLER_LOG = f"{_EXECUTION}.controller.controller"
"""Name of the logger of Ray Train's controller."""
_DEFINED_IN = {
    "Cluster": "ray.cluster_utils",
    "GcsClient": "ray._raylet",
    "GetClusterStatusReply": "ray.core.generated.autoscaler_pb2",
    "RuntimeContext": "ray.runtime_context",
    "is_autoscaler_v2": "ray.autoscaler.v2.utils",
    "is_token_auth_enabled": "ray._private.authentication.authentication_utils",
    "state": "ray._private.state",
    "DatasetsCallback": f"{_TRAIN}.callbacks.datasets",
    "PlacementGroupCleanerCallback": f"{_TRAIN}.callbacks.placement_group_callback",
    "WorkerGroupStartupFailedError": f"{_TRAIN}.exceptions",
    "WorkerHealthCheckFailedError": f"{_TRAIN}.exceptions",
    "TrainController": f"{_EXECUTION}.controller",
    "TrainControllerLoopIterationResult": f"{_EXECUTION}.controller.controller",
    "InitializingState": f"{_EXECUTION}.controller.state",
    "TrainControllerState": f"{_EXECUTION}.controller.state",
    "DefaultFailurePolicy": f"{_EXECUTION}.failure_handling.default",
    "FailureDecision": f"{_EXECUTION}.failure_handling.failure_policy",
    "NoopDecision": f"{_EXECUTION}.scaling_policy",
    "ScalingDecision": f"{_EXECUTION}.scaling_policy",
    "ResizeDecision": f"{_EXECUTION}.scaling_policy",
    "ElasticScalingPolicy": f"{_EXECUTION}.scaling_policy.elastic",
    "WorkerGroup": f"{_EXECUTION}.worker_group",
    "WorkerGroupCallback": f"{_EXECUTION}.callback",
    "WorkerGroupPollStatus": f"{_EXECUTION}.worker_group",
    "PlacementGroupHandle": f"{_EXECUTION}.worker_group.placement_group_handle",
    "WorkerGroupState": f"{_EXECUTION}.worker_group.state",
    "WorkerGroupStateBuilder": f"{_EXECUTION}.worker_group.state",
    "RayTrainWorker": f"{_EXECUTION}.worker_group.worker",
    "Worker": f"{_EXECUTION}.worker_group.worker",
}

_ON_OWN_LIMITS = "springtide.on_own_limits"
"""Key that is set in a ``DataContext`` whose pipelines bypass Ray Data's coordinator of resources (see ``OwnLimits``)."""
_ENOUGH = 2.0**50
"""Amount of each resource that no pipeline can use up. It must be finite, because Ray Data subtracts limits from each other."""


def __getattr__(name: str) -> Any:
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_DEFINED_IN[name]), name)


def is_supported(version: str) -> bool:
    """Return True if this package supports ``version`` of Ray, whose private parts it uses.

    >>> is_supported("2.60.3"), is_supported("2.61.0"), is_supported("3.0.0.dev0")
    (True, False, False)
    """
    major, minor = version.split(".")[:2]
    first, end = SUPPORTED
    return major.isdigit() and minor.isdigit() and first <= (int(major), int(minor)) < end


def replace_synchronization_actor(stand_in: object) -> None:
    """Make Ray Train's worker groups use ``stand_in`` in place of the actor class through which workers synchronize."""
    from ray.train.v2._internal.execution.worker_group import worker_group

    worker_group.SynchronizationActor = stand_in


class OwnLimits:
    """Replaces Ray Data's cluster autoscaler for one pipeline, so that only the limits of its ``execution_options`` apply.

    Ray Data's autoscaler registers each pipeline with one actor, ``AutoscalingCoordinator``, which then recomputes the share of
    every pipeline in every node: the start of W pipelines on N nodes costs the actor W x W x N.
    """

    def try_trigger_scaling(self) -> None:
        """Request no nodes."""

    def on_executor_shutdown(self) -> None:
        """Do nothing, because no nodes were requested."""

    def get_total_resources(self) -> ExecutionResources:
        """Return more of each resource than a pipeline can use."""
        made = importlib.import_module("ray.data").ExecutionResources
        found: ExecutionResources = made(_ENOUGH, 0, _ENOUGH, _ENOUGH)
        return found


def run_on_own_limits(context: DataContext) -> None:
    """Let the pipelines of ``context`` run within the limits of its ``execution_options``, without Ray Data's coordinator.
    Other pipelines of this process keep the coordinator."""
    executor: Any = importlib.import_module("ray.data._internal.execution.streaming_executor")
    context.set_config(_ON_OWN_LIMITS, True)
    executor.create_cluster_autoscaler = _create_cluster_autoscaler


def _create_cluster_autoscaler(
    topology: object, resource_manager: object, data_context: DataContext, **rest: object
) -> object:
    if data_context.get_config(_ON_OWN_LIMITS):
        return OwnLimits()
    create = importlib.import_module("ray.data._internal.cluster_autoscaler").create_cluster_autoscaler
    made: object = create(topology, resource_manager, data_context, **rest)
    return made


def node_affinity(node_id: str) -> NodeAffinitySchedulingStrategy:
    """Return the scheduling strategy that runs a task on this node, or on another node while this one has no room, is drained,
    or is lost."""
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    found: NodeAffinitySchedulingStrategy = strategies.NodeAffinitySchedulingStrategy(
        node_id, soft=True, _spill_on_unavailable=True
    )
    return found


def replace_runtime_context(context: object) -> None:
    """Make ``ray.get_runtime_context`` return ``context`` in this process."""
    from ray import runtime_context

    runtime_context._runtime_context = context


@contextlib.contextmanager
def stay_on_loopback() -> Iterator[None]:
    """While the block runs, make a Ray cluster that this process starts listen on the loopback address. The variable in
    ``LOOPBACK`` changes only the processes that Ray starts: this process has read it already, when it imported Ray. So Ray's
    constant is set instead."""
    from ray._private import ray_constants

    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def few_head_processes() -> Iterator[None]:
    """In the block, ``ray.init`` starts a head without dashboard and autoscaler, because each takes a second of CPU time or
    more. Any thread may call it. ``start_dashboard`` starts the dashboard later."""
    from ray._private.node import Node

    def without_dashboard(node: Any, **_: object) -> None:
        node._webui_url = ""

    before = Node.start_api_server, Node.start_monitor
    Node.start_api_server, Node.start_monitor = without_dashboard, lambda node: None
    try:
        with _processes_of_any_thread():
            yield
    finally:
        Node.start_api_server, Node.start_monitor = before


class _OfAnyThread(subprocess.Popen[bytes]):
    """A process of Ray that any thread may start. It skips Ray's ``preexec_fn``, a function that the child runs before its
    program. That function would end the process as soon as the thread that started it ends. It would also crash the child if
    another thread imports a library at that moment. The process has its own session, so it gets no Ctrl-C from the terminal;
    ``reaper`` ends it with the driver."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named | {"preexec_fn": None, "start_new_session": True})


@contextlib.contextmanager
def _processes_of_any_thread() -> Iterator[None]:
    """Let any thread start Ray's processes in the block."""
    from ray._private import services

    before, services.ConsolePopen = services.ConsolePopen, _OfAnyThread
    try:
        yield
    finally:
        services.ConsolePopen = before


def start_dashboard() -> str:
    """Start the dashboard of a head that this process has started with ``few_head_processes``. Returns its host and port; empty
    if it does not start. Takes seconds."""
    from ray._private import worker

    with _processes_of_any_thread():
        worker._global_node.start_api_server(include_dashboard=True, raise_on_failure=False)
    return worker._global_node.webui_url or ""


def read_authentication() -> None:
    """Make Ray read its authentication mode and token from the environment again, because it caches them."""
    raylet: Any = importlib.import_module("ray._raylet")
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


class _WorkerPaths(list[str]):
    """Folders that Ray puts first on the import path of a job's workers. Ray always adds the current folder. This list accepts
    a folder only if this process itself searches it before the installed packages."""

    def extend(self, paths: Iterable[str]) -> None:
        """Add those of ``paths`` that this process searches before the installed packages; called by ``ray.init``."""
        first = searched_first()
        super().extend(one for one in paths if one in first)


def searched_first() -> list[str]:
    """Return the folders that this process searches for modules before it searches the installed ones."""
    found = [os.path.abspath(one) for one in sys.path]  # an empty entry is the current folder
    installed = os.path.abspath(sysconfig.get_path("stdlib"))
    return found[: found.index(installed)] if installed in found else found


def keep_current_folder_out(job: Any) -> None:
    """Keep the workers of a job from importing modules from the current folder, unless the driver itself imports from there:
    the folder may hold a stranger's files.

    Args:
        job: a ``ray.job_config.JobConfig`` for ``ray.init``.
    """
    job._py_driver_sys_path = _WorkerPaths(job._py_driver_sys_path)


def read_key(key: bytes) -> bytes | None:
    """Return the value stored under ``key`` in the connected cluster's control store; None if there is none."""
    found: bytes | None = importlib.import_module("ray.experimental.internal_kv")._internal_kv_get(key)
    return found


def write_key(key: bytes, value: bytes) -> None:
    """Store ``value`` under ``key`` in the connected cluster's control store. It is lost when the cluster ends."""
    importlib.import_module("ray.experimental.internal_kv")._internal_kv_put(key, value, overwrite=True)


def visit_upload(folder: str, visit: Callable[[Path], None]) -> int:
    """Call ``visit`` with each file and folder below ``folder`` that ``ray job submit --working-dir`` would upload. Names in
    .gitignore and .rayignore files at any level, and in Ray's own list, are left out. Returns a package size: Ray refuses
    packages of this size or more [bytes]."""
    packaging = importlib.import_module("ray._private.runtime_env.packaging")
    constants = importlib.import_module("ray._private.ray_constants")
    ignores = not constants.env_bool(constants.RAY_RUNTIME_ENV_IGNORE_GITIGNORE, False)
    root, silent = Path(folder).absolute(), logging.getLogger(f"{__name__}.silent")
    silent.disabled = True  # Ray's code would log each ignore file
    excludes = [packaging._get_excludes(root, constants.get_runtime_env_default_excludes())]
    packaging._dir_travel(root, excludes, visit, include_gitignore=ignores, logger=silent)
    return int(packaging.GCS_STORAGE_MAX_SIZE)
