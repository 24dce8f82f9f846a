"""Estimate the GPU memory that a step's tensors cannot use: the CUDA context, NCCL's buffers, and fragmentation.

    context     memory that the driver and the libraries hold in each process
    NCCL        channels x connections x the buffers of three protocols, for each communicator
    holes       fragmentation of the allocator: a share of the rest

The buffer sizes are from NCCL 2's ``init.cc`` (``DEFAULT_BUFFSIZE`` and the two constants next to it).
"""

from __future__ import annotations

from collections.abc import Mapping

from springtide.config import Config

USABLE_SHARE = 0.9
"""Share of a device's memory that a step may take; the rest is left to libraries such as NCCL."""
CONTEXT_BYTES = 600_000_000
"""Memory of the CUDA context if the memory in use on the device is not known: assumed, not measured."""
_BUFFERS = {"NCCL_BUFFSIZE": 2**22, "NCCL_LL_BUFFSIZE": 8 * 512 * 8 * 16, "NCCL_LL128_BUFFSIZE": 120 * 640 * 8 * 8}
"""Environment variable -> NCCL's buffer bytes per connection and channel, for its protocols Simple, LL and LL128."""
_CHANNELS = ("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS")
_MOST_CHANNELS = 32
"""Upper bound of NCCL's channels: ``MAXCHANNELS`` until NCCL 2.28. NCCL uses fewer on most machines (24 on eight H100)."""
_CONNECTIONS = 2
"""Number of a rank's NCCL connections with a receive buffer: one in the ring, and one (with data in flight) in the tree."""
_HOLES = 0.04
"""Share kept free for fragmentation and alignment if ``PYTORCH_ALLOC_CONF`` has expandable segments: assumed, not measured."""
_HOLES_FIXED = 0.1
"""Share kept free for fragmentation and alignment without expandable segments: assumed, not measured."""


def nccl_bytes(ranks: int, shards: int, environment: Mapping[str, str]) -> int:
    """Return an upper bound of the memory that NCCL's buffers take on each device [bytes].

    Args:
        ranks: number of workers of the run.
        shards: number of workers over which one copy of the model is sharded.
        environment: environment variables of the workers (``elastic.env``); its NCCL variables are used.

    Examples:
        >>> nccl_bytes(1, 1, {}), round(nccl_bytes(8, 8, {}) / 1e6), round(nccl_bytes(16, 8, {}) / 1e6)
        (0, 617, 1850)
        >>> nccl_bytes(8, 8, {"NCCL_BUFFSIZE": "1048576", "NCCL_MAX_CTAS": "8"}) < nccl_bytes(8, 8, {}) / 5
        True
    """
    channels = min([_MOST_CHANNELS, *(_number(environment, name, _MOST_CHANNELS) for name in _CHANNELS)])
    connection = sum(_number(environment, name, size) for name, size in _BUFFERS.items())
    # one communicator of all ranks; with several sharded copies of the model, two more: within a copy and across copies
    communicators = (ranks > 1) + 2 * (1 < shards < ranks)
    return channels * _CONNECTIONS * connection * communicators


def usable_bytes(config: Config, device_bytes: int, used_bytes: int = 0) -> int:
    """Return the memory of a worker's device that a step's tensors may fill, at the run's largest number of workers [bytes].
    Without GPUs it is all of ``device_bytes``; 0 if ``device_bytes`` is 0 (unknown).

    Args:
        config: settings of the run.
        device_bytes: memory of a device, or the worker's share of it.
        used_bytes: memory that a process holds before its first tensor; 0 if it is not known.

    Examples:
        >>> config = st.Config().override({"elastic.gpus_per_worker": 1, "stream.global_batch": 8, "elastic.max_workers": 8})
        >>> round(usable_bytes(config, 80 * 10**9) / 1e9, 1), usable_bytes(config, 0)
        (75.6, 0)
    """
    elastic = config.elastic
    if not elastic.gpus_per_worker or not device_bytes:
        return device_bytes
    ranks = elastic.max_workers
    nccl = nccl_bytes(ranks, config.parallel.shards or ranks, elastic.env)
    grows = "expandable_segments:False" not in elastic.env.get("PYTORCH_ALLOC_CONF", "")
    left = device_bytes - (used_bytes or CONTEXT_BYTES) - nccl
    return max(1, round(left * (1 - (_HOLES if grows else _HOLES_FIXED))))


def _number(environment: Mapping[str, str], name: str, otherwise: int) -> int:
    value = environment.get(name, "")
    return int(value) if value.isdecimal() else otherwise
