"""What of a GPU's memory is not there for a step's tensors: the process's context, NCCL's buffers, and holes between segments.

    context     what the driver and the libraries hold in each process
    NCCL        channels x connections x the buffers of three protocols, for each communicator
    holes       a share of the rest

Sizes of the buffers are those of NCCL 2's ``init.cc`` (``DEFAULT_BUFFSIZE`` and the two beside it).
"""

from __future__ import annotations

from collections.abc import Mapping

from springtide.config import Config

CONTEXT_BYTES = 600_000_000
"""Where a device has not said how much is in use: assumed, not measured."""
_BUFFERS = {"NCCL_BUFFSIZE": 2**22, "NCCL_LL_BUFFSIZE": 8 * 512 * 8 * 16, "NCCL_LL128_BUFFSIZE": 120 * 640 * 8 * 8}
"""Variable -> bytes of a connection in a channel, of the protocols Simple, LL and LL128."""
_CHANNELS = ("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS")
_MOST_CHANNELS = 32
"""NCCL takes fewer on most machines (24 on eight H100): an upper bound, as ``MAXCHANNELS`` was until 2.28."""
_CONNECTIONS = 2
"""Receiving ends of a rank in a ring and in a tree that has data in flight: buffers lie at the receiver."""
_HOLES = 0.04
"""Share kept free for holes and alignment where segments grow (``PYTORCH_ALLOC_CONF``): assumed, not measured."""
_HOLES_FIXED = 0.1
"""The same where segments do not grow."""


def nccl_bytes(ranks: int, shards: int, environment: Mapping[str, str]) -> int:
    """Return an upper bound of what NCCL's buffers take on each device [bytes].

    Args:
        ranks: workers of the run.
        shards: workers that a copy of the model is sharded over.
        environment: ``elastic.env``, whose NCCL variables count.

    Examples:
        >>> nccl_bytes(1, 1, {}), round(nccl_bytes(8, 8, {}) / 1e6), round(nccl_bytes(16, 8, {}) / 1e6)
        (0, 617, 1850)
        >>> nccl_bytes(8, 8, {"NCCL_BUFFSIZE": "1048576", "NCCL_MAX_CTAS": "8"}) < nccl_bytes(8, 8, {}) / 5
        True
    """
    channels = min([_MOST_CHANNELS, *(_number(environment, name, _MOST_CHANNELS) for name in _CHANNELS)])
    connection = sum(_number(environment, name, size) for name, size in _BUFFERS.items())
    # all ranks; and where copies are sharded, a communicator within a copy, and one between copies
    communicators = (ranks > 1) + 2 * (1 < shards < ranks)
    return channels * _CONNECTIONS * connection * communicators


def usable_bytes(config: Config, device_bytes: int, used_bytes: int = 0) -> int:
    """Return what of each worker's device a step's tensors may fill, with as many workers as the run may have; all of it
    without GPUs, 0 if it is unknown [bytes].

    Args:
        config: settings of the run.
        device_bytes: memory of a device, or the worker's share of it.
        used_bytes: what a process holds before its first tensor, if the device has said it.

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
