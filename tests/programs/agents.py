"""Nodes that are agents of torchrun on this machine, and steps that a test lets pass."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from ranks import meeting_place

from springtide import config as configs
from springtide.config import Config
from springtide.events import Event
from springtide.storage import Folder
from springtide.tracking.journal import read_journal

PATIENCE_S = 120.0
_LOOK_S = 0.05
_RENDEZVOUS = "is_host=false,join_timeout=120,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=4"
_GATED = Path(__file__).with_name("gated.py")


class Agent:
    """A node: an agent of torchrun, its worker, and what both print."""

    def __init__(self, folder: Path, name: str, nodes: str, config: Config, gate: Path, port: int) -> None:
        """``nodes``: as ``--nnodes``; ``port``: of the store where agents meet."""
        file, self._log = folder / f"{name}.yaml", folder / f"{name}.log"
        self.notice_file = folder / f"{name}.notice"
        file.write_text(configs.dump(config.override({"elastic.notice_file": str(self.notice_file)})))
        launch = f"--nnodes={nodes} --nproc-per-node=1 --max-restarts=9 --monitor-interval=0.1 --local-addr=127.0.0.1"
        meet = f"--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port} --rdzv-id=it --rdzv-conf={_RENDEZVOUS}"
        command = [sys.executable, "-m", "torch.distributed.run", *launch.split(), *meet.split()]
        # torchrun gives each group the arguments of the first: only that one is to begin again
        command += [str(_GATED), str(gate), "--config", str(file), "--from-scratch"]
        with self._log.open("wb") as log:
            # torch 2.13: with the shared store, a first rank that stays does not tell a node that joins where to meet
            environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            self.process = psutil.Popen(command, stdout=log, stderr=log, cwd=folder, env=environment)

    @property
    def said(self) -> str:
        """All that it and its workers have printed."""
        return self._log.read_text(errors="replace")

    def workers(self) -> list[psutil.Process]:
        """The processes below the agent."""
        return self.process.children(recursive=True)

    def kill(self) -> None:
        """Take the node away, without a word."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [self.process, *self.workers()]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()


class Nodes:
    """The nodes of one run."""

    def __init__(self, folder: Path, config: Config, nodes: str = "1:2") -> None:
        # kept here, as on a machine that stays: a node may be lost, whichever it is
        self._store, where = meeting_place()
        self.run = Folder(config.run.root) / config.run.id
        self._folder, self._config, self._port, self._nodes = folder, config, int(where["MASTER_PORT"]), nodes
        self._gate = folder / "gate"
        self.let_pass(0)
        self.agents: list[Agent] = []

    def start(self) -> Agent:
        """Add a node."""
        name = f"node-{len(self.agents)}"
        agent = Agent(self._folder, name, self._nodes, self._config, self._gate, self._port)
        self.agents.append(agent)
        return agent

    def let_pass(self, steps: int) -> None:
        """Let the steps up to this one be trained."""
        temporary = self._gate.with_suffix(".new")
        temporary.write_text(str(steps))
        temporary.replace(self._gate)

    def events(self) -> list[Event]:
        """The journal so far."""
        return read_journal(self.run)

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        """Until the condition holds. Raises with what the agents said if that takes too long, or all agents have ended."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            ended = all(agent.process.poll() is not None for agent in self.agents)
            if (ended and not condition()) or time.monotonic() > deadline:
                said = "\n".join(f"--- {agent.process.pid}\n{agent.said[-3000:]}" for agent in self.agents)
                raise TimeoutError(
                    f"{what}: {'the agents have ended' if ended else f'not in {PATIENCE_S:g} s'}\n{said}"
                )
            time.sleep(_LOOK_S)  # between looks


@contextlib.contextmanager
def nodes(folder: Path, config: Config) -> Iterator[Nodes]:
    """Nodes of a run, which end with the block."""
    found = Nodes(folder, config)
    try:
        yield found
    finally:
        for agent in found.agents:
            agent.kill()
