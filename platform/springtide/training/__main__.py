"""``torchrun --nproc-per-node 2 -m springtide.training --config FILE``: train without Ray."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import torch

from springtide import config as configs
from springtide.checkpoint import branch, leases
from springtide.checkpoint.format import committed
from springtide.checkpoint.fresh_start import begin_once
from springtide.checkpoint.leases import process_id
from springtide.config.elastic import ElasticConfig
from springtide.config.steps import StepsDone
from springtide.distributed import Connections, gpu_environment, on_first, process_group, world
from springtide.elastic import GroupRequest
from springtide.elastic.forecast import RunHistory
from springtide.errors import ConfigError, explain
from springtide.events import Event, Left, Started, record
from springtide.events.listeners import Listeners
from springtide.preemption import open_sources, poll
from springtide.preemption.notices import Notice
from springtide.storage import Folder
from springtide.stream import Batch, RankReader, load, open_data
from springtide.tracking.console import Console
from springtide.tracking.journal import Journal
from springtide.training import GroupContext, TrainLoop
from springtide.training.compile_cache import CompileCache, key_of
from springtide.training.forgetting import with_old_sets
from springtide.training.preflight import check_gpu
from springtide.training.start_check import check_objective, check_start, check_tensors
from springtide.training.teacher import FIELD as TEACHER


def main() -> None:
    """Train the given config, from the newest checkpoint if the run has one."""
    parser = argparse.ArgumentParser(prog="python -m springtide.training", description=__doc__)
    parser.add_argument(
        "--config", required=True, help="a resolved config, as `springtide data prepare --save FILE` writes it"
    )
    parser.add_argument(
        "--accept-changes", action="store_true", help="resume although the config trains something else"
    )
    parser.add_argument(
        "--from-scratch", action="store_true", help="restart the run at step 0; its checkpoints are set aside"
    )
    parser.add_argument("--trust-code", action="store_true", help="run the code that the config names")
    options = parser.parse_args()
    # do not check here whether the user's code is trusted: ``check_trusted`` below does, once the run is known
    config = configs.load_config(options.config, trust_code=True)
    if not config.shards.dataset or not config.run.id:
        raise ConfigError(
            explain(
                "shards.dataset",
                config.shards.dataset,
                "must be set in the config, and so must run.id",
                "pass a config that `springtide data prepare --run.id ID --save FILE` wrote",
            )
        )
    folder = Folder(config.run.root) / config.run.id
    claimed = leases.trusted_code(folder, config.needs_trust)
    configs.check_trusted(config.needs_trust, options.config, options.trust_code, claimed)
    before = (
        configs.parse(folder.read(configs.RUN_CONFIG), folder.where(configs.RUN_CONFIG))
        if folder.exists(configs.RUN_CONFIG)
        else None
    )
    if config.train.start_from:
        known = before.train.start_from if before else ""
        config = config.override({"train.start_from": branch.resolve(config.train.start_from, known)})
    if config.objective.teacher:
        known = before.objective.teacher if before else ""
        config = config.override({TEACHER: branch.resolve(config.objective.teacher, known, TEACHER)})
    if before:
        if not options.accept_changes:
            stored = folder.read(configs.RUN_CONFIG), folder.where(configs.RUN_CONFIG)
            configs.check_nothing_lost(*stored, "--accept-changes")
        configs.check_same_run(before, config, options.accept_changes)
    device = "cuda" if torch.cuda.is_available() and config.elastic.gpus_per_worker else "cpu"
    if device == "cuda":  # overwrites environment variables that torchrun has set
        os.environ.update(gpu_environment(config.elastic.env, config.parallel.deterministic))
    request = LeaveRequest(os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0)
    with process_group(device):
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        finished = train(config, folder, device, local_rank, options.from_scratch, request)
    if not finished:
        request.end_agent()
        sys.exit(LEFT)


def train(
    config: configs.Config,
    folder: Folder,
    device: str,
    local_rank: int,
    from_scratch: bool = False,
    request: LeaveRequest | None = None,
) -> bool:
    """Train in this process as one rank of the process group. Returns False if the worker group saved and ended before the
    run's last step.

    ``request`` handles signals, in the main thread, and preemption notices; None handles neither. Raises RunExists, before
    anything is written, if another process has the lease (the right to write the run)."""
    here, owner = world(device, local_rank, config.parallel.shards), secrets.token_hex(8)
    of_gpu, as_given = check_gpu(here.device), config
    config, remarks = on_first(lambda: with_old_sets(as_given))
    watch = HangWatchdog(config.num_steps, float(config.elastic.hang))
    data = open_data(config.data)
    data.check_epochs(config.num_steps)
    check_objective(config, data)
    compiled = CompileCache(folder, key_of(folder, config), config)
    context = GroupContext(owner, heartbeat=watch.heartbeat, compiled=compiled)
    compiled.load(here.device)
    run = TrainLoop(config, here, data, folder, context=context)
    if config.train.start_from:
        on_first(lambda: check_begin(run))
    if config.objective.teacher:
        on_first(lambda: branch.keep(config.objective.teacher, config.run.id, TEACHER))
    claim = functools.partial(leases.claim, folder, owner, trains=False, sources=config.needs_trust)
    # claim the run before any write: a process that cannot claim it must write nothing
    term = on_first(lambda: claim().term)
    try:
        if from_scratch and not on_first(lambda: begin_once(folder, term, job_of_torchrun())):
            remarks = [*remarks, "--from-scratch: this job has begun the run at step 0 before, and goes on"]
        return _train(run, watch, term, local_rank, request, [*of_gpu, *remarks])
    finally:
        if here.is_first:
            leases.end(folder, term)


def job_of_torchrun() -> str:
    """Return an id that all worker groups of this torchrun job share; empty without torchrun. Raises ConfigError if the job has
    several nodes and no ``--rdzv-id``, because its nodes then share no id."""
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    if job is None:
        return ""
    if job not in ("", "none"):
        return job
    if os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE"):
        problem = "would be repeated whenever torchrun starts the group again, and this job has no name"
        raise ConfigError(explain("--from-scratch", True, problem, "give torchrun --rdzv-id NAME"))
    return f"{socket.gethostname()} {process_id(os.getppid())}"


def check_begin(run: TrainLoop) -> None:
    """Check that a run without a checkpoint of its own can start from ``train.start_from``, a checkpoint of another run. Mark
    that checkpoint as needed, so that the other run does not delete it. Raises ConfigError if the run cannot start from it."""
    config, data = run.config, run.data
    if committed(run.folder):
        return
    check_start(config, data.order.identity_at, data.tokenizer_digest)
    check_tensors(config, data)
    branch.keep(config.train.start_from, config.run.id)


def _train(
    run: TrainLoop,
    watch: HangWatchdog,
    term: int,
    local_rank: int,
    request: LeaveRequest | None,
    remarks: Sequence[str],
) -> bool:
    """Train under the lease (the right to write the run) with the number ``term``. Returns False if the worker group saved and
    ended before the run's last step. ``remarks``: texts to show to the user on the console."""
    config, folder, is_first = run.config, run.folder, run.world.is_first

    def feed(reader: RankReader, step: StepsDone) -> Iterator[Batch]:
        return load(reader, reader.plan(step, config.num_steps, int(config.feed.read_bytes)))

    if is_first:
        resolved = config.override({"stream.skip": run.data.order.skip})
        folder.write(configs.RUN_CONFIG, configs.dump(resolved), private=bool(configs.secret_fields(resolved)))
    left = False
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(watch))
        journal = stack.enter_context(Journal(folder, enabled=is_first, term=term))
        console = stack.enter_context(Console(config.num_steps, is_first))
        listeners = Listeners([journal, console, watch])
        for remark in (*remarks, *run.data.leaks, *run.data.repeats(config.num_steps)):
            console.say(remark)
        if request:
            peers = Connections()
            stack.callback(request.end)  # before the journal closes: other ranks may end while rank 0 closes it
        for event in run.events(feed, request or (lambda: None)):
            listeners(event)
            # handle signals only from this event on: before it there is nothing to save, so a signal may end the process
            if request and isinstance(event, Started):
                request.listen(config.elastic, socket.gethostname(), peers, poll_notices=local_rank == 0)
            left |= isinstance(event, Left)
    if left and is_first:
        leases.end(folder, run.lease.term)
    return not left


class HangWatchdog:
    """Watchdog that ends this process if no event or heartbeat comes for too long, and prints the stacks of its threads to
    stderr. torchrun then restarts the worker group, as the driver does on Ray."""

    def __init__(self, num_steps: int, least_s: float) -> None:
        """``least_s``: shortest time without an event or heartbeat that may count as a hang (``elastic.hang``) [s]; 0 turns the
        watchdog off."""
        self._history, self._least_s = RunHistory(num_steps), least_s

    def __call__(self, event: Event) -> None:
        self._history.add(record(event))
        self.heartbeat()

    def heartbeat(self) -> None:
        """Restart the timeout: this process is alive."""
        if self._least_s:
            faulthandler.dump_traceback_later(self._history.longest_s(self._least_s), exit=True)

    def close(self) -> None:
        """Stop the watchdog, so that silence no longer ends this process."""
        faulthandler.cancel_dump_traceback_later()


# The request to leave this machine, under torchrun. The whole group then saves and ends.
#
# SIGTERM or SIGINT, from torchrun's agent --+
# a preemption notice of this machine -------+--> this rank sends a request in the step's all-reduce --> every rank saves and
# the agent has ended -----------------------+                                                            ends with status LEFT
#
# torchrun runs one agent process on each node. When a worker ends with status LEFT, the agents start a new group. On a machine
# with a preemption notice, the agent would also start a worker again. To prevent this, the rank sends SIGTERM to that agent. A
# rank that has lost another rank cannot finish the next step, and NCCL would hang. So the rank exits.
#
# Source: torch.distributed.elastic.agent.server of torch 2.13. If a signal ends an agent, the agent passes the signal on to its
# workers. An agent also sends its workers SIGTERM when nodes join, and when another worker of its node has failed. It kills
# workers that have not ended after 30 s. If a signal ended the agent, --shutdown-timeout sets this time instead.

LEFT = os.EX_TEMPFAIL
"""Exit status 75, "try again", of a rank whose group has saved and ended before the run's last step. torchrun then starts a new
group."""
_LOOK_S = 0.5
"""Time between two checks that the parent process, torchrun's agent, is still alive [s]."""
_RAISE_S = 3.0
"""Time between the loss of another rank and the forced end of this process [s]. In this time the rank may raise an error of its
own, such as from a gloo collective."""


class LeaveRequest:
    """Collects reasons to leave this machine. The loop calls this object in each step. It returns the request EVACUATE (save
    and end the group) if there is a reason, else None."""

    def __init__(self, agent: int = 0) -> None:
        """``agent``: process id of the torchrun agent that started this process; 0 if none did."""
        self._agent = agent
        self._notice: Notice | None = None
        self._reason = ""
        self._listens = self._ended = False

    def __call__(self) -> GroupRequest | None:
        return GroupRequest.EVACUATE if self._reason else None

    def listen(self, elastic: ElasticConfig, node: str, peers: Connections, poll_notices: bool) -> None:
        """Start to handle signals, and to watch the other ranks, torchrun's agent and preemption notices. Call it in the main
        thread; a second call does nothing. A second SIGINT raises KeyboardInterrupt.

        Args:
            elastic: settings of the sources of preemption notices.
            node: the name of this node.
            peers: the connections to the other ranks.
            poll_notices: True on the one rank per node that polls for the node's preemption notices.
        """
        if self._listens:
            return
        self._listens = True
        for kind in (signal.SIGTERM, signal.SIGINT):
            signal.signal(kind, self._on_signal)
        threading.Thread(target=self._watch_peers, args=(peers,), name="springtide-peers", daemon=True).start()
        if self._agent:
            threading.Thread(target=self._watch_agent, name="springtide-agent", daemon=True).start()
        if poll_notices and elastic.notices != "off":
            where = elastic.metadata_url, elastic.notice_file, elastic.leave_on_rebalance
            poll(open_sources(elastic.notices, *where, node, self._on_notice))

    def end(self) -> None:
        """Stop treating the end of another rank as a failure: from now on the ranks end on purpose."""
        self._ended = True

    def end_agent(self) -> None:
        """Send SIGTERM to torchrun's agent if this machine has a preemption notice. Otherwise the agent would start a worker
        here again."""
        if self._notice and self._agent == os.getppid():
            _say(f"asks torchrun's agent (process {self._agent}) to end: {self._notice.why}")
            os.kill(self._agent, signal.SIGTERM)

    def _on_signal(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and self._reason.startswith("SIGINT"):
            raise KeyboardInterrupt
        self._ask(signal.Signals(number).name)

    def _on_notice(self, notice: Notice) -> None:
        self._notice = notice
        self._ask(f"{notice.why}, {max(0.0, notice.at_s - time.time()):.0f} s are left")

    def _watch_agent(self) -> None:
        while os.getppid() == self._agent:
            time.sleep(_LOOK_S)  # poll: a process gets no signal when its parent ends
        self._ask("torchrun's agent has ended")

    def _watch_peers(self, peers: Connections) -> None:
        peers.wait_until_lost()
        time.sleep(_RAISE_S)  # let the main thread raise its own error, if it does not hang in a collective
        if not self._ended:
            _say("ends: another rank of its group is gone")
            os._exit(1)

    def _ask(self, reason: str) -> None:
        if not self._reason:
            self._reason = reason
            _say(f"asked to leave ({reason}): the group saves after this step and ends with status {LEFT}")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # writing fails if the agent that reads stderr has ended
        os.write(sys.stderr.fileno(), f"springtide, process {os.getpid()}: {text}\n".encode())


if __name__ == "__main__":
    main()
