"""Write down what every rank of a hung worker group is doing, into the run's folder, before the group is ended.

<run>/hangs/step-0000000040-1795249320.txt     the stacks of all threads of each rank that answers; which ranks do not
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future

import ray
from ray.exceptions import RayError

from springtide.checkpoint.staging import in_thread
from springtide.on_ray._ray_private import Worker
from springtide.store import Folder

_ANSWER_S = 5.0
_WRITE_S = 5.0


def stacks() -> str:
    """Return the stack of each thread of this process; called in a worker's process while ``work`` runs."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


def diagnose(workers: Sequence[Worker], run: Folder, step: int) -> tuple[str, list[Worker]]:
    """Write down what ``workers``, by rank, are doing. Returns a summary of it and the workers that
    do not answer."""
    asked = [worker.actor.execute.remote(stacks) for worker in workers]
    done = set(ray.wait(asked, num_returns=len(asked), timeout=_ANSWER_S)[0])
    silent: dict[str, Worker] = {}
    text = ""
    for rank, (answer, worker) in enumerate(zip(asked, workers, strict=True)):
        where = f"rank {rank} on node {worker.metadata.node_id[:8]}, pid {worker.metadata.pid}"
        try:
            found = ray.get(answer) if answer in done else ""
        except RayError as error:
            found = str(error)
        if not found:
            silent[where] = worker
        text += f"{where}\n{found or f'does not answer within {_ANSWER_S:g} s'}\n\n"
    name = f"step-{step:010d}-{int(time.time())}.txt"
    written = in_thread("springtide-hang", lambda: (run / "hangs").write(name, text), daemon=True)
    summary = (
        f"{' and '.join(silent)} {'does' if len(silent) == 1 else 'do'} not answer" if silent else "every rank answers"
    )
    return f"{summary}; {_where(written, name)}", list(silent.values())


def _where(written: Future[None], name: str) -> str:
    """Return where the stacks are. The store may be what the group waits for: the group is ended whether or not it answers."""
    try:
        written.result(_WRITE_S)
    except TimeoutError:
        return f"their stacks are still being written to hangs/{name}"
    except Exception as error:  # of any store's client
        return f"their stacks could not be written: {type(error).__name__}: {error}"
    return f"their stacks are in hangs/{name}"
