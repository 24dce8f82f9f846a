"""What Ray Train finds in a worker's environment, and what it then does with devices and NCCL's watchdog. No cluster."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from ray.air._internal.device_manager.nvidia_gpu import CUDATorchDeviceManager
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig
from ray.train.torch.config import _setup_torch_process_group
from ray.train.v2._internal.callbacks.accelerators import AcceleratorSetupCallback

from springtide import config as configs
from springtide.distributed import backend, device_index, gpu_environment
from springtide.ray.cluster import session
from springtide.ray.train.trainer import worker_environment

ASYNC = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
VISIBLE = "CUDA_VISIBLE_DEVICES"


class Worker:
    """One of a node of four devices, whose actor was given the one called ``device``."""

    def __init__(self, device: str) -> None:
        self.visible = device
        self.metadata = SimpleNamespace(node_id="node", accelerator_ids={"GPU": [device]})

    def execute_async(self, function: Any, accelerator_ids: str) -> str:
        self.visible = accelerator_ids
        return accelerator_ids


def test_two_workers_on_a_node_of_eight_gpus_get_device_0_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their actors were given the GPUs 3 and 6; each process sees one, and so its own is number 0."""
    monkeypatch.setattr(ray, "get", lambda references: references)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES", None)
    session.set_environment()
    workers: list[Any] = [Worker("3"), Worker("6")]
    scaling = ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"GPU": 1})
    AcceleratorSetupCallback(TorchConfig(backend=backend("cuda")), scaling).before_init_train_context(workers)
    host = [f"GPU-{number}" for number in range(8)]
    used = []
    for local_rank, worker in enumerate(workers):
        seen = [host[int(one)] for one in worker.visible.split(",")]  # as CUDA numbers what it may see
        monkeypatch.setattr(torch.cuda, "device_count", lambda seen=seen: len(seen))
        index = device_index(local_rank)
        used.append((index, seen[index]))
    assert used == [(0, "GPU-3"), (0, "GPU-6")]


@pytest.mark.parametrize(("ours", "visible"), [(True, ["0", "1", "2", "3"]), (False, ["0,1,2,3"] * 4)])
def test_a_worker_goes_on_seeing_the_one_device_of_its_actor(
    monkeypatch: pytest.MonkeyPatch, ours: bool, visible: list[str]
) -> None:
    """Ray's own way, shown beside it, widens what CUDA has read already."""
    monkeypatch.setattr(ray, "get", lambda references: references)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES", None)
    if ours:
        session.set_environment()
    workers: list[Any] = [Worker(str(device)) for device in range(4)]
    scaling = ScalingConfig(num_workers=4, use_gpu=True, resources_per_worker={"GPU": 1})
    AcceleratorSetupCallback(TorchConfig(backend=backend("cuda")), scaling).before_init_train_context(workers)
    assert [worker.visible for worker in workers] == visible
    # and the device that Ray then selects for the training thread, of a process in which CUDA has seen one
    chosen = []
    for device, worker in enumerate(workers):
        monkeypatch.setattr(ray, "get_gpu_ids", lambda device=device: [device])
        monkeypatch.setitem(os.environ, VISIBLE, worker.visible)
        chosen += [one.index for one in CUDATorchDeviceManager().get_devices()]
    assert chosen == ([0, 0, 0, 0] if ours else [0, 1, 2, 3])


@pytest.mark.parametrize(("ours", "expected"), [(True, "0"), (False, "1")])
def test_the_watchdog_is_off_when_ray_makes_the_group(
    monkeypatch: pytest.MonkeyPatch, ours: bool, expected: str
) -> None:
    """Ray's own way, shown beside it, turns it on."""
    config = configs.recipes.tiny().override({"elastic.gpus_per_worker": 1.0})
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in gpu_environment({}, deterministic=False):
        os.environ.pop(name, None)
    if ours:
        os.environ.update(worker_environment(config)["env_vars"])
    seen = {}
    monkeypatch.setattr(dist, "init_process_group", lambda **named: seen.update(os.environ, backend=named["backend"]))
    _setup_torch_process_group(backend("cuda"), world_rank=1, world_size=2, init_method="env://")
    assert seen["backend"] == "cpu:gloo,cuda:nccl"
    assert seen[ASYNC] == expected


def test_what_a_user_gives_workers_on_gpus_reaches_them_before_torch_is_loaded() -> None:
    given = {"NCCL_SOCKET_IFNAME": "eth0", "PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}
    config = configs.recipes.tiny().override({"elastic.env": given})
    assert worker_environment(config) == {}
    found = worker_environment(config.override({"elastic.gpus_per_worker": 1.0}))["env_vars"]
    assert found == gpu_environment(given, deterministic=False)
    assert found.items() >= {**given, ASYNC: "0"}.items()
    usual = worker_environment(configs.recipes.tiny().override({"elastic.gpus_per_worker": 1.0}))["env_vars"]
    assert usual["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "CUBLAS_WORKSPACE_CONFIG" not in usual
    same = config.override({"elastic.gpus_per_worker": 1.0, "parallel.deterministic": True})
    assert worker_environment(same)["env_vars"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_workers_without_gpus_are_started_in_the_environment_that_is_there() -> None:
    assert worker_environment(configs.recipes.tiny()) == {}
