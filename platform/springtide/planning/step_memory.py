"""Predict the device memory of a step by running the step itself on fake tensors, which have shapes but no memory.

Only this file uses torch's fake tensors and torch's fake process group.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from springtide.checkpoint.tensors import local, materialize
from springtide.config import Config
from springtide.distributed import world
from springtide.distributed.compiled import takes_flex
from springtide.distributed.fsdp import parallelize
from springtide.distributed.offload import as_if_offloaded
from springtide.model import Decoder, make
from springtide.model.attention import attention_as_on
from springtide.model.flex import same_memory
from springtide.model.loss import logits_as_on
from springtide.model.objective import Objective, next_token, zeros
from springtide.optim.average import set_newest_share
from springtide.optim.build import optimizer_of, square_norm
from springtide.optim.parameter_groups import blocks_freeze_alike, freeze
from springtide.shards import load_labels
from springtide.storage import Folder
from springtide.training.anchor import Anchor
from springtide.training.losses import LossOptions
from springtide.training.part import Work
from springtide.training.step import StepSetup, accumulate
from springtide.training.teacher import Teacher

_STAND_IN = f"{next_token.__module__}:{next_token.__name__}"
_ONE = (1, 1.0)
"""Values returned when code reads a scalar from a fake tensor, which has no values: for integer types, for floating-point
types."""
_FEW, _MORE = 2, 4
"""Numbers of blocks of two shallow models. The memory of a deeper model is extrapolated from the two models' memory: each block
with the same attention window adds the same."""


def predicted_bytes(config: Config, vocab_size: int, eos_id: int | None, world_size: int) -> int:
    """Return the peak bytes of tensors that rank 0 of ``world_size`` holds in a step: weights, gradients, moments, averaged
    weights, activations, and whole tensors while they are gathered. Not included: some hundred MB that libraries hold, and
    saves, which use host memory. The process must not be in a process group."""
    if not config.sources and not config.objective.labels:  # cached: the result depends only on the arguments
        return _known(config.model_dump_json(), vocab_size, eos_id, world_size)
    try:
        return _predicted(config, vocab_size, eos_id, world_size)
    except DynamicOutputShapeException:
        if not config.sources:
            raise
        # a user's function has shapes that depend on tensor values, which fake tensors lack: replace it with a built-in
        # function of similar memory
        changes = {"optim.source": "", "objective.source": _STAND_IN if config.objective.source else ""}
        changes |= {"objective.labels": "", "objective.teacher": ""}
        return _predicted(config.override(changes), vocab_size, eos_id, world_size)


@functools.lru_cache(maxsize=256)  # planning predicts the memory of the same config many times
def _known(config: str, vocab_size: int, eos_id: int | None, world_size: int) -> int:
    return _predicted(Config.model_validate_json(config), vocab_size, eos_id, world_size)


def _predicted(config: Config, vocab_size: int, eos_id: int | None, world_size: int) -> int:
    model = config.model
    if model.num_layers <= _MORE or _blocks_differ(config, vocab_size):
        return _peak(config, vocab_size, eos_id, world_size)
    windows = [model.window_of(layer) for layer in range(model.num_layers)]
    rest, blocks = 0, 0.0
    for window in set(windows):
        alike = {"window": window, "global_every": 0}
        shallow = [model.model_copy(update={**alike, "num_layers": depth}) for depth in (_FEW, _MORE)]
        few, more = (_peak(config.model_copy(update={"model": one}), vocab_size, eos_id, world_size) for one in shallow)
        a_block = (more - few) / (_MORE - _FEW)
        blocks += a_block * windows.count(window)
        # `rest`: memory outside the blocks, plus what the last block holds temporarily in backward. The maximum over attention
        # windows is an upper bound, because the window of the last block may need less
        rest = max(rest, math.ceil(more - _MORE * a_block))
    return rest + math.ceil(blocks)


def _blocks_differ(config: Config, vocab_size: int) -> bool:
    some = config.optim.groups or config.model.adapter != "none"
    return bool(some) and not blocks_freeze_alike(make(config.model, vocab_size), config.optim)


def _peak(config: Config, vocab_size: int, eos_id: int | None, world_size: int) -> int:
    rows = -(-config.stream.global_batch // world_size)
    size = min(config.train.rows_at_once, rows)
    settings, objective = config.objective, None
    labels = load_labels(Folder(settings.labels)).layout if settings.labels else None
    with _no_peers(world_size):
        # `world` is called outside of the fake tensor mode, because the device mesh that it creates needs real tensors
        here = world("cpu", 0, config.parallel.shards)
        device = "cuda" if config.elastic.gpus_per_worker else "cpu"
        as_there = (logits_as_on(device), attention_as_on(device))
        leaves = device == "cuda" and config.parallel.offloads_activations
        offloads = as_if_offloaded() if leaves else contextlib.nullcontext()
        with as_there[0], as_there[1], offloads, FakeTensorMode(allow_non_fake_inputs=True), _Live() as live:
            # no compilation, because only shapes matter; fp8 is replaced by bf16, in which activations are kept for backward
            layout = config.parallel.model_copy(update={"compile": False, "precision": config.parallel.computes_in})
            model = make(config.model, vocab_size, eos_id)
            freeze(model, config.optim)
            model = parallelize(model, layout, here)
            if device == "cuda" and isinstance(model, Decoder) and takes_flex(model.config, layout.computes_in):
                model.attend_by(same_memory)
            optimizer = optimizer_of(model, config.optim)
            materialize(optimizer)
            if device == "cuda" and config.parallel.offloads_parameters:
                live.leave_out(model, optimizer)
            anchor = Anchor(model, config) if config.objective.anchor else None
            if settings.source:
                teacher = (
                    Teacher(config, vocab_size, eos_id, None, False, torch.device("cpu")) if settings.teacher else None
                )
                columns_of = teacher.layout if teacher else labels
                given = vocab_size, torch.device("cpu"), columns_of, settings, eos_id, None, False, teacher
                objective = Objective(settings.source, *given)
            rows_NL = torch.zeros(min(rows, 2 * size), config.shards.sequence_length + 1, dtype=torch.int64)
            parts = [slice(begin, begin + size) for begin in range(0, len(rows_NL), size)]
            columns = zeros(labels, len(rows_NL), torch.device("cpu"))
            loss = LossOptions(config.optim.z_loss, objective)
            share = accumulate(StepSetup(model, optimizer, here, loss), Work(rows_NL, parts, 1, columns=columns), 1.0)
            square_norm(share.gradients)
            if anchor:
                anchor.sums()
            torch._foreach_mul_(share.gradients, 0.5)
            if anchor:
                anchor.add_gradients(0.5)
            set_newest_share(optimizer, 0.5)
            optimizer.step()
            del share
        return live.peak


class _Live(TorchDispatchMode):
    """Measures the peak of the total bytes of live tensors, after each operation. Tensors that existed before the context was
    entered do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._left_out: Callable[[], set[int]] = set
        """Function that returns the keys of the tensor storages that are not counted, because they are in host memory."""
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def leave_out(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Do not count the shards of weights and gradients, nor the moments: they are in host memory (``parallel.offload``).
        Gathered weights count twice: as whole weights, and as the shards that were copied to the device to gather them."""
        keys: dict[Tensor, int] = {}  # cached, because `_key` of a shard runs a torch operation

        def state() -> set[int]:
            shards = [weight for weight in model.parameters() if isinstance(weight, DTensor)]
            keys.update((shard, _key(shard)) for shard in shards if shard not in keys)
            gradients = (shard.grad for shard in shards if shard.grad is not None)
            moments = (one for of in optimizer.state.values() for one in of.values() if isinstance(one, Tensor))
            with torch.no_grad():
                return {keys[shard] for shard in shards} | {_key(one) for one in (*gradients, *moments)}

        self._left_out = state

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation is torch.ops.aten._local_scalar_dense.default:
            return _ONE[args[0].dtype.is_floating_point]  # for code that reads a scalar, such as a step count
        found = operation(*args, **(kwargs or {}))
        known = len(self._storages)
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                storage = local(leaf).untyped_storage()
                if storage._cdata not in self._storages:
                    self._storages[storage._cdata] = weakref.ref(storage, self._forget(storage._cdata))
        if len(self._storages) > known:
            # read the sizes of all storages again: FSDP frees and refills storages without a torch operation
            others = self._left_out()
            alive = (reference() for key, reference in list(self._storages.items()) if key not in others)
            self.peak = max(self.peak, sum(storage.nbytes() for storage in alive if storage is not None))
        return found

    def _forget(self, key: int) -> Callable[[object], None]:
        def forget(_: object) -> None:
            self._storages.pop(key, None)

        return forget


def _key(tensor: Tensor) -> int:
    return int(local(tensor).untyped_storage()._cdata)


@contextlib.contextmanager
def _no_peers(world_size: int) -> Iterator[None]:
    """Create, for the context, a process group of ``world_size`` ranks whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Meter(TorchDispatchMode):
    """Measures the peak bytes of real tensors on ``device``, minus the bytes at the time when the meter was created. On a GPU
    it reads torch's allocator; on a CPU it reads the C library's allocator after each operation."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        gc.collect()
        self._device, self._most = device, 0
        self._before = self._now()

    def lap(self) -> int:
        """Return the peak since the previous call, or since the meter was created [bytes]."""
        most = self._most
        if self._device.type == "cuda":
            most = torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        self._most = self._now()
        return most - self._before

    def _now(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else _allocated()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = operation(*args, **(kwargs or {}))
        if self._device.type == "cpu":
            self._most = max(self._most, _allocated())
        return found


class _Mallinfo2(ctypes.Structure):
    """Memory statistics of glibc's malloc: ``struct mallinfo2`` of malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    )


@functools.cache
def _mallinfo2() -> Callable[[], _Mallinfo2]:
    found = ctypes.CDLL(None).mallinfo2
    found.restype = _Mallinfo2
    return found


def _allocated() -> int:
    """Return the memory that this process has allocated with glibc's malloc, which holds torch's CPU tensors [bytes]."""
    found = _mallinfo2()()
    return int(found.uordblks + found.hblkhd)
