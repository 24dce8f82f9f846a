"""The training loop: an iterator of events. It knows nothing of Ray, consoles or trackers; those listen.

feed(step)   -> batches from that step on
interrupt()  -> what is asked of the loop, looked at once a step
"""

from __future__ import annotations

import dataclasses
import resource
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from springtide import checkpoint
from springtide.config import Config, fingerprint
from springtide.elastic import micro_batches
from springtide.model import build, flops_per_token, num_parameters
from springtide.parallel import World, parallelize
from springtide.store import Folder
from springtide.stream import Batch, Data, ahead, check, digest
from springtide.track.events import Event, Saved, Started, StepDone, Stopped, Waited
from springtide.train.evaluate import evaluate
from springtide.train.optim import adamw, learning_rate, set_learning_rate
from springtide.train.peak import peak_flops
from springtide.train.step import Interrupt, StepResult, train_step

Feed = Callable[[int], Iterator[Batch]]


@dataclasses.dataclass
class Run:
    """One group of workers' view of a run, from restore to the last step."""

    config: Config
    world: World
    data: Data
    folder: Folder
    """The run's folder; checkpoints lie below it."""
    labels: dict[str, str] = dataclasses.field(default_factory=dict)
    """Written into every checkpoint: the MLflow run id and the like."""

    def __post_init__(self) -> None:
        if self.config.parallel.threads:
            torch.set_num_threads(self.config.parallel.threads)
        model = build(self.config.model, self.data.vocab_size, self.data.separator)
        self.flops_per_token = flops_per_token(model, self.data.sequence_length)
        self.num_parameters = num_parameters(model)
        self.model = parallelize(model, self.config.parallel, self.world)
        self.exact = self.config.parallel.reduction == "fp64"
        """Whether sums over micro-batches and workers are exact, so that the world size shows in no bit."""
        self.optimizer = adamw(
            self.model, self.config.optim, fused=not (self.exact and self.world.device.type == "cpu")
        )
        self.step = 0
        """Steps done: the whole data state."""
        self.tokens = 0
        self.data_waits_s = [0.0] * self.world.size
        """What each rank waited for its feed since this group of workers began."""
        self.peak_flops, self.peak_source = peak_flops(self.world.device)

    def events(self, feed: Feed, interrupt: Callable[[], Interrupt | None]) -> Iterator[Event]:
        """Train to the end of the run, or until asked to stop."""
        yield self._restore()
        config, last = self.config, self.config.num_steps
        if self.step == 0 and config.train.eval_rows:
            yield self._evaluate()
        saved = self.step
        batches = to_device(feed(self.step) if self.step < last else (), self.world.device)
        clock = time.perf_counter()
        while self.step < last:
            batch, tokens_NL = next(batches)
            data_wait_s = time.perf_counter() - clock
            check(self.data.order, self.world.rank, self.world.size, self.step, batch)
            result, rate = self._step(batch, tokens_NL, interrupt(), data_wait_s)
            now = time.perf_counter()
            yield self._done(result, rate, now - clock)
            stop = Interrupt.STOP in result.interrupts
            every = config.checkpoint.every_steps
            due = every and self.step % every == 0
            if due or stop or Interrupt.SAVE in result.interrupts or self.step == last:
                yield Waited(step=self.step, data_waits_s=[round(wait, 3) for wait in self.data_waits_s])
                yield self._save()
                saved = self.step
            if stop and self.step < last:
                yield Stopped(step=self.step, status="stopped", reason=f"asked to; saved at step {saved}")
                return
            clock = time.perf_counter()
        if config.train.eval_rows:
            yield self._evaluate()
        yield Stopped(step=self.step, status="finished")

    def _step(
        self, batch: Batch, tokens_NL: Tensor, interrupt: Interrupt | None, data_wait_s: float
    ) -> tuple[StepResult, float]:
        config = self.config
        total = config.num_steps * config.tokens_per_step
        rate = learning_rate(config.optim, (self.step + 1) * config.tokens_per_step, total)
        set_learning_rate(self.optimizer, rate)
        order, world = self.data.order, self.world
        result = train_step(
            self.model,
            self.optimizer,
            tokens_NL,
            digest(batch.sample_ids),
            self.world,
            micro_batches=micro_batches(
                order.lane_rows(self.step, world.rank, world.size),
                order.rows_per_lane,
                -(-order.lanes // world.size),
                config.train.micro_batch,
                by_lane=self.exact,
            ),
            tokens_per_step=config.tokens_per_step,
            clip_norm=config.optim.clip_norm,
            interrupt=interrupt,
            data_wait_s=data_wait_s,
        )
        self.data_waits_s = [sum(waits) for waits in zip(self.data_waits_s, result.data_waits_s, strict=True)]
        self.step += 1
        self.tokens += result.tokens
        return result, rate

    def _done(self, result: StepResult, rate: float, step_time_s: float) -> StepDone:
        tokens_per_s = result.tokens / step_time_s
        return StepDone(
            step=self.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=rate,
            tokens=self.tokens,
            step_tokens=result.tokens,
            step_time_s=step_time_s,
            data_wait_s=max(result.data_waits_s),
            tokens_per_s=tokens_per_s,
            mfu=self.flops_per_token * tokens_per_s / (self.peak_flops * self.world.size),
            memory_bytes=_peak_memory(self.world.device),
            world_size=self.world.size,
            digest=f"{result.digest:016x}",
        )

    def _evaluate(self) -> Event:
        train = self.config.train
        return evaluate(self.model, self.data, self.world, self.step, train.eval_rows, train.micro_batch)

    def _save(self) -> Saved:
        begin = time.perf_counter()
        state = checkpoint.Meta(
            step=self.step,
            tokens=self.tokens,
            world_size=self.world.size,
            order_identity=self.data.order.identity_at(self.step),
            config_fingerprint=fingerprint(self.config),
            labels=self.labels,
        )
        name, size = checkpoint.save(self.folder, self.model, self.optimizer, state, self.config.checkpoint.keep_last)
        return Saved(step=self.step, name=name, size_bytes=size, save_time_s=time.perf_counter() - begin)

    def _restore(self) -> Started:
        found = checkpoint.restore(self.folder, self.model, self.optimizer, self.data.order.identity_at)
        if found is not None:
            self.step, self.tokens = found.step, found.tokens
        return Started(
            step=self.step,
            world_size=self.world.size,
            resumed_from=checkpoint.name_of(found.step) if found else "",
            order_identity=self.data.order.identity,
            num_parameters=self.num_parameters,
            flops_per_token=self.flops_per_token,
            peak_flops=self.peak_flops,
            peak_source=self.peak_source,
        )


def to_device(batches: Iterable[Batch], device: torch.device) -> Iterator[tuple[Batch, Tensor]]:
    """The batches and their tokens, int64 (n, L + 1), on ``device``. For a GPU they reach pinned memory a batch ahead, in a
    thread, so that the copy runs beside the computing."""
    pairs: Iterator[tuple[Batch, Tensor]] = (
        (batch, torch.from_numpy(batch.tokens.astype(np.int64))) for batch in batches
    )
    if device.type == "cuda":
        pairs = ahead((batch, tokens_NL.pin_memory()) for batch, tokens_NL in pairs)
    return ((batch, tokens_NL.to(device, non_blocking=True)) for batch, tokens_NL in pairs)


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
