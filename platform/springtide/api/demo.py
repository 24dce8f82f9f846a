"""``make demo``: a short training of which two workers are killed, and what each kill cost."""

from __future__ import annotations

from collections.abc import Callable

from springtide.config import Config
from springtide.dataset import Progress
from springtide.events import Event, StepDone
from springtide.run.folder import Run
from springtide.tracking.ledger import Restart

_PARTS = (1 / 3, 2 / 3)
"""When a worker is killed, in parts of the training."""


def demonstrate(config: Config, progress: Progress | None = None, say: Callable[[str], None] = print) -> Run:
    """Train ``config`` and kill a worker with SIGKILL at one and at two thirds of its steps; returns the run. No worker of a
    cluster that the user named is killed."""
    from springtide.api.train import train
    from springtide.ray.cluster.local import kill_worker

    due = [round(config.num_steps * part) for part in _PARTS]

    def kill_when_due(event: Event) -> None:
        if isinstance(event, StepDone) and due and event.step >= due[0]:
            del due[0]
            if pid := kill_worker():
                say(f"step {event.step}: kill -9 {pid}, one of {event.world_size} workers")

    return train(config, listen=kill_when_due, progress=progress)


def account(run: Run) -> str:
    """Return what a finished demo shows, as text: its restarts, held-out loss, proof and report."""
    before, after = (run.evaluations[at].heldout_bits_per_byte for at in (0, -1))
    restarts = [_words(restart) for restart in run.ledger.restarts]
    found = run.verify()
    proof = f"{found.steps_checked} steps trained on exactly the samples of the uninterrupted run"
    again = f"; {found.steps_trained_again} of them twice" if found.steps_trained_again else ""
    return "\n".join(
        [
            *restarts,
            f"held-out  {before:.3f} -> {after:.3f} bits per byte ({1 - after / before:.0%} less)",
            f"verify    {proof + again if found.ok else 'NOT the samples of the uninterrupted run: springtide verify'}",
            f"report    {run.report}",
        ]
    )


def _words(restart: Restart) -> str:
    steps = f"{restart.steps_lost} step{'s' * (restart.steps_lost != 1)} trained again"
    workers = f"{restart.workers_before} -> {restart.workers_after} workers"
    return f"restart   step {restart.step}: {restart.gap_s:.1f} s without training, {steps}, {workers}"
