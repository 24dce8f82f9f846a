"""Saves without a training loop, in processes that may be killed: state is a function of the step, so that what is restored
can be compared with what was saved."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from faults import arm
from ranks import forking
from torch import nn

from springtide.checkpoint import leases, writer_process
from springtide.checkpoint.async_saver import AsyncSaver, SaveOutcome
from springtide.checkpoint.commit import PieceWriter
from springtide.checkpoint.format import Meta
from springtide.checkpoint.restore import restore
from springtide.checkpoint.retention import Rule
from springtide.checkpoint.tensors import named_tensors
from springtide.errors import RunExists
from springtide.storage import Folder

HERE = str(Path(__file__).parent)
WIDTH = 64


def state(step: int, width: int = WIDTH) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, every number of which depends on the step."""
    torch.manual_seed(step)
    model = nn.Sequential(nn.Linear(width, 2 * width), nn.Linear(2 * width, width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(4, width)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def meta(step: int) -> Meta:
    """Of a run of one process."""
    return Meta(step=step, tokens=step, world_size=1, order_identity="o", config_fingerprint="c", metrics={"loss": 1.0})


def save(
    url: str,
    steps: list[int],
    *,
    owner: str = "test",
    stage_in: str = "/dev/shm",
    tries: int = 3,
    keep: int = 10,
    width: int = WIDTH,
    term: int = 0,
) -> list[SaveOutcome]:
    """Save these steps one after the other, as a new lease or the one given."""
    run = Folder(url)
    number = term or leases.claim(run, owner).term
    found = []
    with AsyncSaver(run, number, 0, 1, stage_in=stage_in, tries=tries, rule=Rule(keep)) as one:
        for step in steps:
            model, optimizer = state(step, width)
            one.begin(named_tensors(model, optimizer), meta(step), {})
            one.staged()
            outcome = one.poll(wait=True)
            assert outcome is not None
            found.append(outcome)
        one.end()  # what the writing process does after its answer belongs to the save, too
    leases.end(run, number)
    return found


def resume(url: str, width: int = WIDTH) -> dict[str, Any]:
    """Restore the newest good step and check every bit of it; then save one more."""
    run = Folder(url)
    model, optimizer = state(0, width)
    found = restore(run, model, optimizer, lambda step: "o")
    step = found.meta.step if found else 0
    if found:
        expected = named_tensors(*state(step, width))
        for name, tensor in named_tensors(model, optimizer).items():
            assert torch.equal(tensor, expected[name]), name
    [last] = save(url, [step + 5], owner="resumed", stage_in="", width=width)
    assert last.error is None, last.error
    return {"step": step, "rejected": found.rejected if found else ()}


def save_with_a_fault(url: str, where: str, nth: int, told: str) -> list[SaveOutcome]:
    """Save steps 5 and 10; the trainer or the writer is killed at its ``nth`` call within the save of step 10."""
    if where == "writer":
        armed = json.dumps([PieceWriter.write.__qualname__, 10, nth, told])
        program = f"import sys, json; sys.path.insert(0, {HERE!r}); import faults; faults.main(json.loads({armed!r}))"
        writer_process.PROGRAM = ("-c", program)
    else:
        arm(AsyncSaver.begin.__qualname__, 10, nth, told)
    return save(url, [5, 10])


def apart(function: Any, *arguments: Any, **keywords: Any) -> Any:
    """What ``function`` returns in a process of its own; None when that is killed."""
    context = forking()  # the one server of this process: whoever starts it decides what it imports, and from where
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_apart, args=(theirs, dict(os.environ), function, arguments, keywords))
    process.start()
    theirs.close()
    try:
        ok, value = ours.recv()
    except EOFError:
        process.join()
        assert process.exitcode == -signal.SIGKILL
        return None
    process.join()
    if not ok:
        raise value
    return value


def claim_apart(url: str, elsewhere: bool = False) -> Any:
    """Claim a run, as if on another machine where there is nothing to see of this one's: the process that did, or why not."""
    if elsewhere:
        leases.socket.gethostname = lambda: "elsewhere"  # type: ignore[attr-defined]
    try:
        return leases.claim(Folder(url), "second").pid
    except RunExists as error:
        return str(error)


def claim_together(barrier: Any, results: Any, url: str, number: int) -> None:
    """Claim at one moment with others, each having seen the same newest lease."""
    newest = leases.newest

    def wait(run: Folder) -> Any:
        found = newest(run)
        leases.newest = newest
        barrier.wait()
        return found

    leases.newest = wait
    try:
        leases.claim(Folder(url), f"claimant {number}")
        results.put(None)
    except RunExists as error:
        results.put(str(error))


def apart_all(function: Any, url: str, number: int) -> list[Any]:
    """What ``number`` processes that run ``function`` together say."""
    context = forking()
    barrier, results = context.Barrier(number), context.Queue()
    processes = [
        context.Process(target=_with, args=(dict(os.environ), function, barrier, results, url, one))
        for one in range(number)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    return found


def _with(environment: dict[str, str], function: Any, *arguments: Any) -> None:
    os.environ.update(environment)
    function(*arguments)


def _apart(connection: Any, environment: dict[str, str], function: Any, arguments: Any, keywords: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        connection.send((True, function(*arguments, **keywords)))
    except BaseException as error:
        connection.send((False, error))
