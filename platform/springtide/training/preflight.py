"""Preflight of a new process before it joins a worker group: one step of a small model, sharded as in a group, and a check of
the device.

So everything that is loaded, compiled or allocated at first use is ready before other ranks wait for this process. A device
that computes wrong results, or slowly, is found before it trains.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from springtide.config import Config
from springtide.config.engine import ModelConfig
from springtide.distributed import World, backend, world
from springtide.distributed.fsdp import parallelize
from springtide.elastic.health import Health
from springtide.errors import ConfigError, explain
from springtide.model import skeleton
from springtide.optim.build import may_fuse, optimizer_of
from springtide.optim.parameter_groups import freeze
from springtide.storage.host_limits import lacks_locked_memory, lacks_shared_memory
from springtide.training.compile_cache import CompileCache, padded_rows
from springtide.training.device import choose_kernels, peak_flops
from springtide.training.device_check import check_device
from springtide.training.nvml import gpu_of
from springtide.training.part import Work
from springtide.training.state import initialize
from springtide.training.step import StepSetup, train_step

_VOCABULARY = 256
_END_OF_TEXT = 0
_ROWS = 2
_LENGTH = 32
_TIMES = 3
_MOST_USED = 0.1
"""Largest share of a GPU's memory that other processes may use [ratio]."""
_LEAST_USED = 2 * 2**30
"""Memory in use that is always accepted, because it includes this process's own CUDA context and libraries [bytes]."""
_LOOKS, _LOOK_S = 10, 1.0


def preflight(config: Config, compiled: CompileCache | None = None) -> Health:
    """Run the preflight and return the device's health: speeds and faults. The process must not be in a torch process group
    when this is called, and is in none afterwards.

    Args:
        config: the run's config.
        compiled: cache of the run's compiled code, which is loaded first; None loads none.
    """
    with _alone("cuda" if config.elastic.gpus_per_worker else "cpu") as here:
        bind_to_gpu(here.device)
        choose_kernels(config.parallel)
        if compiled is not None:
            compiled.load(here.device)
        if not config.model.source:  # no test step with a user's model, which may be large
            one_block = config.model.model_copy(update={"num_layers": 1})
            _step(config, here, one_block, _VOCABULARY, *_shape(config), as_several=config.elastic.max_workers > 1)
        peak_flops(here.device)
        found = check_device(here.device)
    if here.device.type == "cpu":
        return found
    wrong = found.wrong or device_fault(here.device, config.elastic.gpus_per_worker)
    return found._replace(wrong=wrong, remark="; ".join(host_remarks(here.device)))


def check_gpu(device: torch.device) -> list[str]:
    """Return warnings about a GPU and its host: problems that the user should fix, but that do not prevent training. Returns
    none for a CPU. Raises ConfigError if the GPU must not train. Processes that a user starts call this function. On Ray, the
    node of a GPU that must not train is excluded instead.

    Args:
        device: this process's device.
    """
    if device.type != "cuda":
        return []
    if fault := device_fault(device):
        remedy = "repair it, or hide it with CUDA_VISIBLE_DEVICES (springtide doctor says more)"
        raise ConfigError(explain("device", str(device), fault, remedy))
    return host_remarks(device)


def device_fault(device: torch.device, share: float = 1.0) -> str:
    """Return why a GPU must not train, as a text to put after "its device"; empty if no reason is known. If other processes use
    memory of the GPU, that memory is polled for about 10 s, because a process that has just ended frees its memory a little
    later.

    Args:
        device: the GPU.
        share: share of the GPU that the worker has. If it is below 1, other processes may use the GPU, too.
    """
    gpu = gpu_of(device)
    if gpu is not None and (fault := gpu.fault()):
        return fault
    used, total = _used_by_others(device)
    for _ in range(_LOOKS if share >= 1 else 0):
        if used <= max(_LEAST_USED, _MOST_USED * total):
            return ""
        time.sleep(_LOOK_S)
        used, total = _used_by_others(device)
    if share < 1:
        return ""
    return f"has {used / 1e9:.0f} of {total / 1e9:.0f} GB in use by others: end them (nvidia-smi shows who)"


def _used_by_others(device: torch.device) -> tuple[int, int]:
    """Return the GPU memory in use, without this process's tensors, and the GPU's total memory [bytes]."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device), total


def host_remarks(device: torch.device) -> list[str]:
    """Return warnings about a GPU and its host: problems that the user should fix, but that do not prevent training.

    Args:
        device: the GPU.
    """
    gpu, name = gpu_of(device), torch.cuda.get_device_name(device)
    found = gpu.remarks() if gpu is not None else []
    if "MIG" in name.split():
        found.append(f"{name} is a slice of a GPU: it reaches others through the host's memory, not by NVLink")
    return [*found, *filter(None, (lacks_shared_memory(), lacks_locked_memory()))]


def measure_throughput(config: Config, vocab_size: int) -> float:
    """Return the tokens per second of training on this device alone, with micro-batches as in ``config``. The process must not
    be in a process group before, and is in none afterwards."""
    with _alone("cuda" if config.elastic.gpus_per_worker else "cpu") as here:
        choose_kernels(config.parallel)
        rows = min(config.train.rows_at_once, config.stream.global_batch)
        length = config.tokens_per_step // config.stream.global_batch
        return rows * length / min(_step(config, here, config.model, vocab_size, rows, length, _TIMES)[1:])


def _shape(config: Config) -> tuple[int, int]:
    """Return the number of rows and the length of the preflight's micro-batch. Both are small, unless blocks are compiled: code
    is compiled for one shape, so the preflight uses the shape of training in a worker group of the maximum size."""
    if not config.parallel.compile:
        return _ROWS, min(_LENGTH, config.model.max_sequence_length)
    return padded_rows(config, config.elastic.max_workers), config.shards.sequence_length


def _step(
    config: Config,
    here: World,
    model_config: ModelConfig,
    vocab_size: int,
    rows: int,
    length: int,
    times: int = 1,
    as_several: bool = False,
) -> list[float]:
    """Run ``times`` steps of one micro-batch of random ids. Returns the duration of each step [s]. ``as_several``: shard as a
    group of several ranks does (``parallelize``)."""
    eos_id = _END_OF_TEXT if config.shards.mask_across_documents else None
    plain = skeleton(model_config, vocab_size, eos_id)
    freeze(plain, config.optim)
    model = parallelize(plain, config.parallel, here, as_several=as_several)
    initialize(model, model_config, vocab_size)
    ours = config.optim.model_copy(update={"source": ""})  # not a user's own optimizer, which may need the user's model
    optimizer = optimizer_of(model, ours, may_fuse(config.parallel, here.device))
    rows_NL = torch.randint(vocab_size, (rows, length + 1), device=here.device)
    setup, work, took_s = (
        StepSetup(model, optimizer, here, clip_norm=1.0),
        Work(rows_NL, [slice(0, rows)], rows * length),
        [],
    )
    for _ in range(times):
        begin = time.perf_counter()
        train_step(setup, work)
        if here.device.type == "cuda":
            torch.cuda.synchronize()
        took_s.append(time.perf_counter() - begin)
    return took_s


@contextlib.contextmanager
def _alone(device_type: str) -> Iterator[World]:
    """Create a process group of one rank for the body of the ``with`` statement."""
    dist.init_process_group(backend(device_type), store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield world(device_type)
    finally:
        dist.destroy_process_group()


# Bind a process to the CPUs near its GPU: those of the NUMA node that the GPU's bus is attached to. Then host memory that is
# staged for the GPU is allocated on that node. ``torchrun --numa-binding=node`` does the same.


def bind_to_gpu(device: torch.device, sys: str = "/sys", tasks: str = "/proc/self/task") -> set[int]:
    """Restrict all threads of this process to the CPUs that they may use and that are near ``device``. Returns these CPUs.
    Returns no CPUs, and changes nothing, if the host has one NUMA node, if the near node is unknown, or if the process may use
    none of its CPUs.

    Args:
        device: the process's GPU.
        sys: path of sysfs.
        tasks: folder with an entry for each thread of this process.
    """
    if device.type != "cuda" or not hasattr(os, "sched_setaffinity"):
        return set()
    near = near_cpus(pci_address(torch.cuda.get_device_properties(device)), sys) & os.sched_getaffinity(0)
    for thread in os.listdir(tasks) if near else ():
        with contextlib.suppress(OSError):  # the thread may have ended
            os.sched_setaffinity(int(thread), near)
    return near


def pci_address(properties: object) -> str:
    """Return the PCI address of a device, as the kernel writes it, such as ``0000:dc:00.0``; empty if torch does not report it.

    Args:
        properties: result of ``torch.cuda.get_device_properties``.
    """
    parts = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if any(part is None for part in parts):
        return ""
    domain, bus, slot = map(int, parts)  # type: ignore[arg-type]  # all are set here
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def near_cpus(address: str, sys: str = "/sys") -> set[int]:
    """Return the CPUs of the NUMA node that a device's bus is attached to; none if the host has only one NUMA node or the near
    node is unknown.

    Args:
        address: PCI address of the device.
        sys: path of sysfs.
    """
    nodes = Path(sys, "devices/system/node")
    try:
        if len(list(nodes.glob("node[0-9]*"))) < 2:
            return set()
        node = int(Path(sys, "bus/pci/devices", address, "numa_node").read_text())
        return _numbers((nodes / f"node{node}" / "cpulist").read_text()) if node >= 0 else set()
    except (OSError, ValueError):
        return set()


def _numbers(text: str) -> set[int]:
    """Return the numbers of a list such as ``0-3,8``."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1)) if first else set()
    return found
