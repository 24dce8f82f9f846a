"""What we rely on of Ray's private parts is still there, with the arguments and fields that we use.

Where this fails, Ray has changed: docs/how-to/upgrade-ray.md.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.job_config import JobConfig
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from ray.tune.schedulers import PopulationBasedTraining

from springtide.errors import ConfigError
from springtide.ray import _ray_private as private
from springtide.ray.cluster.session import check_version, private_network

SIGNATURES: dict[str, list[str]] = {
    "Cluster.__init__": ["initialize_head", "connect", "head_node_args", "shutdown_at_exit"],
    "Cluster.add_node": ["wait", "node_args"],
    "Cluster.remove_node": ["node", "allow_graceful"],
    "Cluster.wait_for_nodes": ["timeout"],
    "DefaultFailurePolicy.__init__": ["failure_config"],
    "DefaultFailurePolicy.make_decision": ["training_failed_error"],
    "ElasticScalingPolicy.__init__": ["scaling_config"],
    "ElasticScalingPolicy.make_decision_for_non_running_worker_group": [],
    "ElasticScalingPolicy.make_decision_for_running_worker_group": ["worker_group_state", "worker_group_status"],
    "ElasticScalingPolicy._cancel_resource_request": [],
    "ElasticScalingPolicy._get_num_workers_for_resource_request": [],
    "ElasticScalingPolicy._get_resize_decision": ["num_workers"],
    "ElasticScalingPolicy._maybe_send_resource_request": [],
    "ElasticScalingPolicy._send_resource_request": [],
    "InitializingState.__init__": [],
    "PlacementGroupHandle.ready": [],
    "PlacementGroupHandle.shutdown": [],
    "PlacementGroupHandle.wait": ["timeout_seconds"],
    "PopulationBasedTraining._get_new_config": ["trial", "trial_to_clone"],
    "ScalingConfig._label_selector_per_worker": ["num_workers"],
    "RuntimeContext.__init__": ["worker"],
    "RuntimeContext.get_actor_id": [],
    "TorchTrainer._initialize_and_run_controller": ["controller_init_kwargs"],
    "TrainControllerLoopIterationResult.__init__": [
        *("run_attempt_id", "previous_state", "next_state", "training_failed_error"),
    ],
    "TrainController._start_worker_group": ["num_workers", "resources_per_worker"],
    "TrainController._execute_resize_decision": ["decision"],
    "TrainController._get_run_attempt_id": [],
    "TrainController._make_and_handle_scaling_decision_for_non_running_worker_group": ["controller_state"],
    "TrainController._poll_workers": [],
    "TrainController._shutdown_worker_group": [],
    "TrainController.get_result": [],
    "TrainController.run": [],
    "WorkerGroup._assign_worker_ranks": ["workers", "starting_world_rank", "world_size", "replica_group_size"],
    "WorkerGroup._create_placement_group": ["scaling_config", "worker_group_context"],
    "WorkerGroup._create_workers": [
        *("num_workers", "placement_group", "resources_per_worker", "placement_group_bundle_indices"),
        *("starting_world_rank", "world_size", "replica_group_size"),
    ],
    "WorkerGroup._clear_state": [],
    "WorkerGroupCallback.after_worker_group_start": ["worker_group"],
    "WorkerGroup._get_worker_runtime_env": ["custom_runtime_env"],
    "WorkerGroup._start": [],
    "WorkerGroup._start_impl": ["worker_group_state_builder"],
    "WorkerGroup.get_worker_group_state": [],
    "WorkerGroup.get_workers": [],
    "WorkerGroup.poll_status": ["timeout"],
    "WorkerGroup.has_started": [],
    "WorkerGroup.shutdown": [],
    "WorkerGroupStateBuilder.__init__": [],
    "is_autoscaler_v2": ["fetch_from_server", "gcs_client"],
    "is_token_auth_enabled": [],
    "state.actor_table": ["actor_id", "job_id", "actor_state_name"],
}
"""What is called or overridden -> its arguments. Printed by this file when it is run."""
PUBLIC = {
    "PopulationBasedTraining": PopulationBasedTraining,
    "ScalingConfig": ScalingConfig,
    "TorchTrainer": TorchTrainer,
}
"""Public classes whose private methods we override."""
FIELDS = {
    "Worker": ["actor", "metadata", "resources"],
    "WorkerGroupState": ["start_time", "placement_group_handle", "workers", "sync_actor"],
}


def arguments(name: str) -> list[str]:
    owner, _, method = name.partition(".")
    thing: Any = PUBLIC.get(owner) or getattr(private, owner)
    thing = getattr(thing, method) if method else thing
    return [one for one in inspect.signature(thing).parameters if one != "self"]


@pytest.mark.parametrize("name", private._DEFINED_IN)
def test_each_name_is_there(name: str) -> None:
    assert getattr(private, name) is not None


@pytest.mark.parametrize("name", SIGNATURES)
def test_what_we_call_or_override_takes_the_same_arguments(name: str) -> None:
    assert arguments(name) == SIGNATURES[name]


@pytest.mark.parametrize("name", FIELDS)
def test_what_we_make_has_the_same_fields(name: str) -> None:
    found = [field.name for field in dataclasses.fields(getattr(private, name))]
    assert found[: len(FIELDS[name])] == FIELDS[name]


def test_the_controllers_log_has_its_name() -> None:
    assert importlib.import_module(private.CONTROLLER_LOG).logger.name == private.CONTROLLER_LOG


def test_what_we_replace_is_there() -> None:
    from ray import runtime_context
    from ray.train.v2._internal.execution.worker_group import worker_group

    assert hasattr(runtime_context, "_runtime_context")
    assert hasattr(worker_group, "SynchronizationActor")


def test_ray_extends_the_paths_of_a_job_which_is_where_we_leave_out_the_current_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = JobConfig()
    private.keep_current_folder_out(job)
    monkeypatch.chdir(tmp_path)
    for path, kept in ((sys.path, False), ([*sys.path, str(tmp_path)], False), (["", *sys.path], True)):
        job._py_driver_sys_path.clear()
        monkeypatch.setattr(sys, "path", path)
        job._py_driver_sys_path.extend([str(tmp_path)])
        assert bool(job._py_driver_sys_path) == kept
    assert "job_config._py_driver_sys_path.extend(code_paths)" in inspect.getsource(ray._private.worker)


def test_a_request_of_resources_asks_its_config_for_the_label_of_each_worker() -> None:
    from ray.train._internal.autoscaling_coordinator_client import build_train_resource_request

    config: Any = ScalingConfig(num_workers=(1, 4), resources_per_worker={"CPU": 1})
    config._label_selector_per_worker = lambda number: [{"place": str(one)} for one in range(number)]
    assert build_train_resource_request(config, 2) == ([{"CPU": 1}] * 2, [{"place": "0"}, {"place": "1"}])


def test_the_controller_reads_its_interval_where_we_set_it() -> None:
    from ray.train.v2._internal.execution.controller import controller

    assert "self._health_check_interval_s" in inspect.getsource(controller.TrainController._poll_workers)
    assert "self._world_rank_to_ongoing_poll" in inspect.getsource(private.WorkerGroup._get_poll_tasks)


@pytest.mark.usefixtures("ray_authentication")
def test_ray_asks_for_a_token_and_stays_on_loopback_where_we_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ray.util.get_node_ip_address()
    for mode in ("disabled", "token"):
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
        with private_network(str(tmp_path)):
            assert private.is_token_auth_enabled() == (mode == "token")
            assert private.LOOPBACK.items() <= os.environ.items()
            assert ray.util.get_node_ip_address() == "127.0.0.1"
    assert ray.util.get_node_ip_address() == before


def test_a_name_that_is_not_listed_is_refused() -> None:
    with pytest.raises(AttributeError, match="no_such_part"):
        private.no_such_part  # noqa: B018


def test_the_installed_version_is_supported_and_another_is_refused_with_both() -> None:
    check_version(ray.__version__)
    for version in ("2.59.1", "2.61.0", "3.0.0.dev0"):
        with pytest.raises(ConfigError, match=rf"{version}.*>= 2\.60 and < 2\.61"):
            check_version(version)


def test_a_pipeline_on_its_own_asks_no_coordinator_and_others_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.data import DataContext
    from ray.data._internal import cluster_autoscaler
    from ray.data._internal.execution import streaming_executor

    ours, others = DataContext(), DataContext()
    monkeypatch.setattr(streaming_executor, "create_cluster_autoscaler", cluster_autoscaler.create_cluster_autoscaler)
    monkeypatch.setattr(cluster_autoscaler, "create_cluster_autoscaler", lambda *given, **named: (given, named))
    private.run_on_own_limits(ours)
    made = streaming_executor.create_cluster_autoscaler({}, "limits", ours.copy(), execution_id="a")  # type: ignore[arg-type]
    assert isinstance(made, private.OwnLimits)
    assert made.get_total_resources().object_store_memory > 2**49
    kept = streaming_executor.create_cluster_autoscaler({}, "limits", others, execution_id="b")  # type: ignore[arg-type]
    assert kept == (({}, "limits", others), {"execution_id": "b"})


def test_what_stands_in_for_the_cluster_autoscaler_has_all_that_an_executor_calls() -> None:
    from ray.data._internal.cluster_autoscaler import ClusterAutoscaler, create_cluster_autoscaler
    from ray.data._internal.execution import streaming_executor

    methods = {name for name in vars(private.OwnLimits) if not name.startswith("_")}
    assert ClusterAutoscaler.__abstractmethods__ == methods
    assert [*inspect.signature(create_cluster_autoscaler).parameters] == [
        *("topology", "resource_manager", "data_context", "execution_id")
    ]
    source = inspect.getsource(streaming_executor.StreamingExecutor)
    assert "= create_cluster_autoscaler(" in source
    assert set(re.findall(r"_cluster_autoscaler\.(\w+)", source)) <= methods


if __name__ == "__main__":
    for each in SIGNATURES:
        print(f'    "{each}": {arguments(each)},'.replace("'", '"'))


def test_what_ray_takes_of_a_folder_is_still_told_so() -> None:
    from ray._private import ray_constants
    from ray._private.runtime_env import packaging

    assert [*inspect.signature(packaging._dir_travel).parameters] == [
        *("path", "excludes", "handler", "include_gitignore", "logger")
    ]
    assert [*inspect.signature(packaging._get_excludes).parameters] == ["path", "excludes"]
    assert packaging.GCS_STORAGE_MAX_SIZE == 512 * 2**20
    assert ray_constants.RAY_RUNTIME_ENV_IGNORE_GITIGNORE == "RAY_RUNTIME_ENV_IGNORE_GITIGNORE"


def test_a_head_starts_its_dashboard_and_its_autoscaler_by_two_methods() -> None:
    from ray._private.node import Node

    assert [*inspect.signature(Node.start_api_server).parameters] == ["self", "include_dashboard", "raise_on_failure"]
    assert [*inspect.signature(Node.start_monitor).parameters] == ["self"]
    of_head = inspect.getsource(Node.start_head_processes)
    assert "self.start_api_server(" in of_head
    assert "self.start_monitor()" in of_head
    assert "self._webui_url" in inspect.getsource(Node.start_api_server)


def test_ray_starts_each_process_by_a_popen_that_can_be_replaced() -> None:
    from ray._private import services

    assert issubclass(services.ConsolePopen, subprocess.Popen)
    source = inspect.getsource(services.start_ray_process)
    assert source.count("ConsolePopen(") == 1
    assert source.count("preexec_fn=") == 1
