"""Detection of devices that silently compute wrong results: each rank recomputes a micro-batch of another rank.

    step n       rank 0 announces in the step's all-reduce that step n + 1 is checked
    step n + 1   compute the first micro-batch: keep a summary of its loss and of the gradient at the embedding's output
                 compute the other micro-batches
                 before the weights change: recompute the next rank's first micro-batch, without gradients of weights
                 exchange all summaries; every rank compares them and reaches the same verdict
    all agree    the state after n steps counts as good
    else         compute two more results of each micro-batch, to name the faulty device; abandon all states after the last
                 good state and end the group. The next group resumes from the last good state, without that device's node

A run of a single rank is not checked: a device that makes the same error twice agrees with itself.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from springtide.checkpoint.agreed import components_of
from springtide.checkpoint.format import Meta
from springtide.checkpoint.restore import Restored
from springtide.config import Config
from springtide.config.steps import StepsDone
from springtide.distributed import CollectiveError, World, by_rank, gathered, on_first, shifted
from springtide.distributed.fsdp import reshard
from springtide.errors import UnfitNode
from springtide.events import Event, Miscomputed, Warned
from springtide.training.checkpoint_schedule import CheckpointSchedule
from springtide.training.device_check import check_device
from springtide.training.group_lease import GroupLease
from springtide.training.losses import Compute, MicroBatch, loss_of
from springtide.training.message import StepMessage
from springtide.training.part import DoneStep, Part, Share
from springtide.training.seeds import kept_generators, seed_generators
from springtide.training.state import TrainState

_FIELD = "recheck"


class DevicesDisagree(RuntimeError):
    """Devices compute different results, and it is unclear which one is wrong. The cause may be temporary, so the run starts a
    new worker group."""


class Recheck(Part):
    """Schedules and runs the checks of one worker group: ranks recompute each other's micro-batches and compare the results."""

    def __init__(
        self,
        config: Config,
        world: World,
        state: TrainState,
        nodes: Sequence[str],
        saves: CheckpointSchedule,
        lease: GroupLease,
        seed: Callable[[int], int],
    ) -> None:
        """``nodes``: the node of each rank; empty if unknown. ``seed``: maps a rank to the generator seed with which it begins
        the current step."""
        self._config, self._world, self._state, self._nodes = config, world, state, nodes
        self._saves, self._lease, self._seed = saves, lease, seed
        self._every_s = float(config.elastic.recheck)
        trained = (one for one in state.model.modules() if isinstance(one, nn.Embedding) and one.weight.requires_grad)
        self._embedding = next(trained, None)
        self._exact = config.parallel.exact and world.device.type == "cpu"
        self.begin(None)  # creates the attributes. Each restore calls ``begin`` again to reset them

    def begin(self, found: Restored | None) -> None:
        self._active = self._every_s > 0 and self._world.size > 1
        self._due = False
        """True if the next step is checked; the same on every rank."""
        self._first: tuple[MicroBatch, Tensor] | None = None
        """In a step that is checked: this rank's first micro-batch, and the summary of its result."""
        self._verdict: Verdict | None = None
        self._last_s, self._cost_s, self._wanted = -math.inf, 0.0, False
        self._agreed_step: StepsDone | None = None
        """Steps done at the last state on which all devices agreed; None if devices are not checked."""
        # if the checkpoint does not record a step at which all devices agreed, treat its own step as such a step
        if self._active:
            known = found.agreed_step if found else None
            self._agreed_step = self._state.step if known is None else known

    def describe(self, meta: Meta) -> Meta:
        return meta.adding(components_of(self._agreed_step))

    def contribute(self, message: StepMessage, share: Share) -> None:
        """On rank 0, add to the step's message whether the next step is checked."""
        message.any(_FIELD, self._world.is_first and self._begins_check())

    def _begins_check(self) -> bool:
        """Return True if the next step is checked. Two events make a check come before its regular time. If a save was started
        since all devices last agreed, the check shows whether its checkpoint is good. If an update was skipped, a faulty device
        may be the cause."""
        if not self._active or self._due:
            return False
        now, agreed = time.monotonic(), self._agreed_step
        wanted = self._wanted or (agreed is not None and self._saves.last_step > agreed)
        if not is_due(now - self._last_s, self._every_s, self._cost_s, wanted):
            return False
        self._last_s, self._wanted = now, False
        return True

    def wrap_compute(self, compute: Compute) -> Compute:
        """In a step that is checked, wrap ``compute`` to keep a summary of the first micro-batch's result."""
        return functools.partial(self._watch, compute) if self._due else compute

    def _watch(self, compute: Compute, model: nn.Module, one: MicroBatch) -> Tensor:
        if one.number:
            return compute(model, one)
        found: list[Tensor] = []

        def observe(output: Tensor) -> None:
            output.register_hook(lambda gradient: found.append(of_gradient(gradient)))

        with _output_seen(self._embedding, observe):
            sums = compute(model, one)
        self._first = one, summary(_loss(one, sums), found)
        return sums

    def before_update(self) -> None:
        """In a step that is checked, recompute the next rank's micro-batch, with the weights still unchanged, and compare."""
        if self._first is None:
            return
        begin = time.perf_counter()
        (one, mine), self._first = self._first, None
        self._verdict = _Comparison(self, one).verdict(mine)
        self._cost_s = time.perf_counter() - begin

    def result_of(self, one: MicroBatch, owner: int) -> Tensor:
        """Compute ``one``, a micro-batch of rank ``owner``, on this rank and return the summary of the result."""
        model, outputs = self._state.model, list[Tensor]()
        seed_generators(self._seed(owner))
        with torch.set_grad_enabled(self._embedding is not None), _output_seen(self._embedding, outputs.append):
            total, sums = loss_of(model, one)
        # compute only the gradient at the embedding's output: the step's gradients of the weights must stay unchanged
        found = torch.autograd.grad(total * one.loss_weight, outputs, allow_unused=True) if outputs else ()
        reshard(model)  # free the unsharded weights, which the optimizer's update would make stale
        return summary(_loss(one, sums), [of_gradient(gradient) for gradient in found if gradient is not None])

    def judge(self, results: dict[int, list[tuple[int, MicroBatchResult]]]) -> Verdict:
        """Compare the results that several ranks computed for each micro-batch. ``results``: rank that owns the micro-batch ->
        its results, as for the function ``judge``."""
        return judge(results, self._world.size, self._exact, TOLERANCES[self._config.parallel.precision])

    @property
    def world(self) -> World:
        return self._world

    def after_step(self, done: DoneStep) -> Iterator[Event]:
        """Act on the outcome of a check. If results differ, report it and roll the run back to the last step at which all
        devices agreed. Then raises UnfitNode if the faulty device can be named, else DevicesDisagree."""
        self._due = self._active and done.result.agreed[_FIELD]
        self._wanted |= not done.result.updated
        verdict, self._verdict = self._verdict, None
        if verdict is None:
            return
        if not verdict.disputed:
            self._agreed_step = StepsDone(done.step - 1)
        elif verdict.is_random:
            self._active = self._due = False
            self._agreed_step = None
            yield Warned(step=done.step, reason=_IS_RANDOM)
        else:
            yield from self._go_back(done.step, verdict)

    def _go_back(self, step: StepsDone, verdict: Verdict) -> Iterator[Event]:
        """Report the devices that disagree, abandon the checkpoints and snapshots made since all devices last agreed, and raise
        the same error on all ranks."""
        agreed, ended = self._agreed_step, self._lease.term
        assert agreed is not None, "set while checks are on"
        size = self._world.size
        suspects = sorted(verdict.wrong or {rank % size for owner in verdict.disputed for rank in (owner, owner - 1)})
        nodes = [self._nodes[rank] for rank in suspects] if self._nodes else []
        where = [f"rank {rank}" + (f" on node {self._nodes[rank]}" if self._nodes else "") for rank in suspects]
        if verdict.wrong:
            reason = "; ".join(f"{one}: {why}" for one, why in zip(where, verdict.wrong.values(), strict=True))
        else:
            reason = f"{' and '.join(where)} compute different results for the same micro-batch, each the same again"
        yield Miscomputed(step=step, ranks=list(verdict.wrong), nodes=nodes, agreed_step=agreed, reason=reason)
        yield from self._saves.settle()  # a save in progress must not commit after the other checkpoints are abandoned
        self._lease.term = on_first(lambda: self._lease.go_back_to(ended, agreed, reason))
        told = f"step {step}: {reason}. The states after step {agreed} are abandoned"
        if verdict.wrong:
            raise UnfitNode(f"{told}; leave that device's machine out, then resume", nodes[0] if nodes else "")
        raise DevicesDisagree(
            f"{told}. Only a majority of ranks can show which device is wrong: train on three workers or more, or test "
            "these machines"
        )


_IS_RANDOM = (
    "every rank computes the same micro-batch twice with different results: the model draws random numbers of its own, so "
    "devices that compute wrong results cannot be found. elastic.recheck is off for this worker group; have the model draw "
    "from the generators of torch, numpy or random, which are seeded at each step"
)


class _Comparison:
    """One recheck, run by all ranks together. Each rank computes micro-batches of other ranks again, and all compare the
    results."""

    def __init__(self, recheck: Recheck, one: MicroBatch) -> None:
        self._recheck, self._one, self._world = recheck, one, recheck.world
        rows = one.rows
        mine = [float(len(rows)), checksum(rows), device_kind(self._world.device)]
        mine += [checksum(_bits(column)) for column in one.columns.values()]
        self._announced = by_rank(mine, self._world)
        """For each rank: number of rows of its micro-batch, their checksum, the kind of its device, and the checksum of each
        column of labels."""
        self._results: dict[int, list[tuple[int, MicroBatchResult]]] = {rank: [] for rank in range(self._world.size)}

    def verdict(self, mine: Tensor) -> Verdict:
        """Compute each rank's micro-batch once more, on another rank, and compare the results. If they differ, compute two
        further results of each micro-batch and compare again. ``mine``: the summary of this rank's own micro-batch from the
        step."""
        with kept_generators(self._world.device):
            self._share({0: mine, 1: self._again(1)})
            found = self._recheck.judge(self._results)
            if not found.disputed:
                return found
            self._share({shift: self._again(shift) for shift in shifts(self._world.size)})
        found = self._recheck.judge(self._results)
        if found.wrong or found.is_random:
            return found
        said = gathered(check_device(self._world.device).wrong)  # the comparison names no faulty rank: test the devices
        return found._replace(wrong={rank: f"its device {wrong}" for rank, wrong in enumerate(said) if wrong})

    def _again(self, shift: int) -> Tensor:
        """Fetch the micro-batch of the rank ``shift`` places after this one, compute it here, and return the summary."""
        owner = (self._world.rank + shift) % self._world.size
        lengths = [int(num_rows) for num_rows, *_ in self._announced]
        rows_BL = shifted(self._one.rows, shift, lengths, self._world)
        columns = {name: shifted(one, shift, lengths, self._world) for name, one in self._one.columns.items()}
        sums = [checksum(rows_BL), *(checksum(_bits(column)) for column in columns.values())]
        _, expected, _, *of_columns = self._announced[owner]
        if sums != [expected, *of_columns]:
            raise CollectiveError(f"the rows of rank {owner} arrived damaged on rank {self._world.rank}")
        return self._recheck.result_of(self._one._replace(rows=rows_BL, columns=columns), owner)

    def _share(self, computed: dict[int, Tensor]) -> None:
        """Exchange the summaries that each rank has computed, and add them to ``_results``. ``computed``: shift -> summary of
        the micro-batch of the rank ``shift`` places after this one."""
        for rank, values in enumerate(by_rank(torch.cat(list(computed.values())).tolist(), self._world)):
            for place, shift in enumerate(computed):
                result = of_summary(values[place * SIZE :][:SIZE], device=int(self._announced[rank][2]))
                self._results[(rank + shift) % self._world.size].append((rank, result))


def _bits(column: Tensor) -> Tensor:
    return column.contiguous().view({2: torch.int16, 4: torch.int32}[column.element_size()]).long()


def _loss(one: MicroBatch, sums: Tensor) -> Tensor:
    """Return the loss of a micro-batch, a scalar. ``sums``: the result of a ``Compute``."""
    return sums.sum() if one.loss.objective is None else sums[0]


@contextlib.contextmanager
def _output_seen(embedding: nn.Module | None, observe: Callable[[Tensor], None]) -> Iterator[None]:
    """In the body of the ``with`` statement, call ``observe`` with the first output of ``embedding``. If ``embedding`` is None,
    do nothing."""
    if embedding is None:
        yield
        return
    seen = False

    def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
        nonlocal seen
        if not seen:  # first call only: with activation recomputation, backward calls the embedding again
            seen = True
            observe(output)

    handle = embedding.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


# The summary: the result of a micro-batch in a few numbers that ranks can exchange, computed on the device of the gradient.
#
# loss | norm | two projections: sums of all elements with random signs | a digest of all bits, as four numbers of 16 bits
#
# Integer addition is exact, so the digest is the same in any order of summation. The projections show how much two results
# differ.

_ODD = (0x5851F42D4C957F2D, -0x61C8864680B583EB, 0x2545F4914F6CDD1D)
"""Odd multipliers that mix the bits of an element's index: the first for the digest, the others for the signs of the
projections."""
_LIMBS = 4
SIZE = 2 + len(_ODD[1:]) + _LIMBS
"""Length of a summary, the numbers that stand for a micro-batch's result."""


def of_gradient(gradient_BLD: Tensor) -> Tensor:
    """Return norm, projections and digest of a gradient, float64 (SIZE - 1,). Does not wait for the device."""
    squares, digest = torch.zeros((), dtype=torch.float64, device=gradient_BLD.device), 0
    sums = [torch.zeros_like(squares) for _ in _ODD[1:]]
    begin = 0
    for part_LD in gradient_BLD:  # one row at a time to save memory: the int64 indices take eight bytes per element
        values = part_LD.contiguous().flatten()
        bits = values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
        index = torch.arange(begin, begin + len(values), dtype=torch.int64, device=values.device)
        # multiplication by an odd number is invertible modulo 2**64, so every changed bit of an element changes the digest
        digest = digest + (bits.long() * ((2 * index + 1) * _ODD[0])).sum()
        doubles = values.double()
        squares = squares + doubles.square().sum()
        sums = [
            total + torch.where(index * odd < 0, -doubles, doubles).sum()
            for total, odd in zip(sums, _ODD[1:], strict=True)
        ]
        begin += len(values)
    return torch.stack([squares.sqrt(), *sums, *_limbs(torch.as_tensor(digest, device=squares.device))])


def summary(nats: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """Return the summary of a micro-batch, float64 (SIZE,). ``nats``: its loss. ``gradients``: results of ``of_gradient``, of
    which the first is used; empty if there is no gradient."""
    rest = gradients[0] if gradients else torch.zeros(SIZE - 1, dtype=torch.float64, device=nats.device)
    loss_limbs = torch.stack(_limbs(nats.detach().float().view(torch.int32).long() * _ODD[0]))
    limbs = (rest[-_LIMBS:].long() ^ loss_limbs.long()).double()
    return torch.cat([nats.detach().double().reshape(1), rest[:-_LIMBS], limbs])


def of_summary(values: Sequence[float], device: int) -> MicroBatchResult:
    """Convert a summary to a ``MicroBatchResult``. ``device``: the kind of the device that computed it."""
    nats, norm, *rest = values
    digest = sum(int(limb) << (16 * place) for place, limb in enumerate(rest[-_LIMBS:]))
    return MicroBatchResult(nats, norm, tuple(rest[:-_LIMBS]), digest, device)


def _limbs(digest: Tensor) -> list[Tensor]:
    """Split a 64-bit integer into four numbers of 16 bits, each exact as a float64."""
    return [((digest >> (16 * place)) & 0xFFFF).double() for place in range(_LIMBS)]


def checksum(rows_BL: Tensor) -> float:
    """Return a 48-bit checksum of token ids and their positions, exact as a float64."""
    ids = rows_BL.flatten()
    places = torch.arange(len(ids), dtype=torch.int64, device=ids.device)
    return float(int((ids * (2 * places + 1)).sum()) % 2**48)


@functools.cache
def device_kind(device: torch.device) -> float:
    """Return a number that is equal for devices whose results must be equal bit for bit: same processor, torch and threads."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = torch.backends.cpu.get_cpu_capability() + _processor()
    return float(zlib.crc32(f"{name} {torch.__version__} {torch.get_num_threads()}".encode()))


def _processor() -> str:
    """Return the processor's name; empty if /proc/cpuinfo does not contain it."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        return next((line for line in file if line.startswith("model name")), "")
    return ""


# The verdict on devices: several ranks compute the same micro-batch, and their results are compared.
#
# round 1   each rank recomputes the next rank's micro-batch of the step           all agree: done
# round 2   two more results of each micro-batch. With three or more ranks: one by its own rank, one by a third rank.
#           With two ranks: each rank computes both micro-batches once more.
#
# A rank is named as wrong if its own two results differ, or if two of three ranks contradict it. If two ranks disagree and each
# repeats its own result, neither can be named.

TOLERANCES = {"fp32": 1e-3, "bf16": 0.05, "fp16": 0.02, "fp8": 0.1, "fp8_rowwise": 0.1}
"""Precision -> largest difference that rounding may cause between two results, as a share of the loss or of the gradient norm
[ratio]."""
COST_SHARE = 0.01
"""Largest share of training time that device checks may take when they come earlier than the interval ``every_s`` [ratio]."""


class MicroBatchResult(NamedTuple):
    """The result of a micro-batch on one rank, in a few numbers."""

    nats: float
    """Summed loss."""
    norm: float
    """Norm of the gradient at the embedding's output."""
    projections: tuple[float, ...]
    """Sums of the elements of the gradient at the embedding's output, with random signs. A change of one element changes each
    sum by the same amount."""
    digest: int
    """64-bit digest of the bits of the loss and of the gradient at the embedding's output."""
    device: int = 0
    """The kind of the device that computed the result (``device_kind``)."""


class Verdict(NamedTuple):
    """The outcome of a check of devices: which results differ, and which devices are wrong."""

    disputed: tuple[int, ...] = ()
    """Ranks whose micro-batch has results that differ; empty if all results agree."""
    wrong: Mapping[int, str] = {}
    """Rank whose device is wrong -> the reason; empty if no rank can be named."""
    is_random: bool = False
    """True if every rank computed different results for one micro-batch. Then the model draws random numbers that are not
    seeded, and the devices may be right."""


def shifts(num_ranks: int) -> tuple[int, int]:
    """Return which two micro-batches each rank recomputes in round 2 of a check. 0 stands for the rank's own micro-batch, 2 for
    the micro-batch of the rank two places after it."""
    return (0, 1) if num_ranks == 2 else (0, 2)


def agree(one: MicroBatchResult, other: MicroBatchResult, exact: bool, tolerance: float) -> bool:
    """Return whether two results agree: bit for bit if ``exact`` and both devices are of the same kind, else within
    ``tolerance``, a value of ``TOLERANCES``.

    >>> right = MicroBatchResult(700.0, 2.0, (0.5, -1.0), digest=1)
    >>> rounded = right._replace(projections=(0.5005, -1.0), digest=2)
    >>> agree(right, rounded, exact=False, tolerance=1e-3), agree(right, rounded, exact=True, tolerance=1e-3)
    (True, False)
    """
    if one.digest == other.digest:
        return True
    if exact and one.device == other.device:
        return False
    limit = tolerance * min(one.norm, other.norm)
    pairs = [(one.norm, other.norm), *zip(one.projections, other.projections, strict=True)]
    return _near(one.nats, other.nats, tolerance * min(abs(one.nats), abs(other.nats))) and all(
        _near(mine, yours, limit) for mine, yours in pairs
    )


def _near(one: float, other: float, limit: float) -> bool:
    both_overflow = not math.isfinite(one) and not math.isfinite(other)
    return both_overflow or one == other or abs(one - other) <= limit


def judge(
    results: Mapping[int, Sequence[tuple[int, MicroBatchResult]]], num_ranks: int, exact: bool, tolerance: float
) -> Verdict:
    """Compare the results that ranks computed for each micro-batch. Returns which results differ and which devices are wrong.
    ``results``: rank that owns the micro-batch -> list of (rank that computed it, its result). ``exact`` and ``tolerance``: as
    for ``agree``."""

    def same(one: tuple[int, MicroBatchResult], other: tuple[int, MicroBatchResult]) -> bool:
        return agree(one[1], other[1], exact, tolerance)

    disputed: list[int] = []
    contradicting: set[int] = set()
    outvoted: dict[int, str] = {}
    for owner, computed in results.items():
        different = [(one, other) for one, other in itertools.combinations(computed, 2) if not same(one, other)]
        if not different:
            continue
        disputed.append(owner)
        contradicting |= {one[0] for one, other in different if one[0] == other[0]}
        # reversed, so that the first result of each rank is kept: later keys overwrite earlier ones
        by_rank = dict(reversed(computed))
        if len(by_rank) < 3:
            continue
        votes = {rank: sum(same((rank, mine), one) for one in by_rank.items()) for rank, mine in by_rank.items()}
        if 2 * max(votes.values()) > len(by_rank):
            for rank, agreeing in votes.items():
                if 2 * agreeing <= len(by_rank):
                    outvoted[rank] = (
                        f"{max(votes.values())} of {len(by_rank)} ranks agree on a result, and it has another"
                    )
    wrong = outvoted | dict.fromkeys(contradicting, "it computes the same micro-batch twice with different results")
    named = dict(sorted(wrong.items())) if 2 * len(wrong) <= num_ranks else {}
    return Verdict(tuple(disputed), named, len(contradicting) == num_ranks)


def is_due(since_s: float, every_s: float, cost_s: float, wanted: bool) -> bool:
    """Return whether to check now. The last check was ``since_s`` ago and took ``cost_s``. ``wanted``: True if there is a
    reason to check before ``every_s`` have passed. Such checks take at most ``COST_SHARE`` of the training time.

    >>> [is_due(since_s, 60.0, 0.1, wanted) for since_s, wanted in ((61.0, False), (11.0, False), (11.0, True), (9.0, True))]
    [True, False, True, False]
    """
    return since_s >= (min(every_s, cost_s / COST_SHARE) if wanted else every_s)
