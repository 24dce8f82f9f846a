"""The request to leave this machine, under torchrun: a signal, or a preemption notice. The whole group saves and ends.

    SIGTERM or SIGINT, from torchrun's agent --+
    a preemption notice of this machine -------+--> this rank asks, in the step's all-reduce --> every rank saves, ends
    the agent has ended -----------------------+                                                  with status LEFT

An agent whose worker ends with LEFT starts the next group. The agent of a machine with a notice would start a worker there,
so it is asked to end, too. A rank whose peer is gone cannot reach the next step, and with NCCL it would wait there: it ends.

Source: torch.distributed.elastic.agent.server of torch 2.13. An agent passes on the signal that ends it; it sends SIGTERM when
nodes join, and when another worker of its node has failed; after 30 s (--shutdown-timeout, for the first) it kills.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time

from springtide.config.elastic import ElasticConfig
from springtide.distributed import Connections
from springtide.elastic import GroupRequest
from springtide.elastic.notices import Notice
from springtide.preemption import open_sources, poll

LEFT = os.EX_TEMPFAIL
"""Exit status of a rank whose group has saved and left before the run's last step: 75, "try again"."""
_LOOK_S = 0.5
_RAISE_S = 3.0
"""How long a rank that has lost a peer may take to raise that itself, as it does in a collective of gloo [s]."""


class LeaveRequest:
    """A request to leave this machine. Called by the loop at each step, it returns what this rank asks for."""

    def __init__(self, agent: int = 0) -> None:
        """``agent``: process id of the torchrun agent that started this process; 0 if none did."""
        self._agent = agent
        self._notice: Notice | None = None
        self._reason = ""
        self._listens = self._ended = False

    def __call__(self) -> GroupRequest | None:
        return GroupRequest.EVACUATE if self._reason else None

    def listen(self, elastic: ElasticConfig, node: str, peers: Connections, poll_notices: bool) -> None:
        """Listen to the end of this process, from its main thread; a second SIGINT raises KeyboardInterrupt. Called again, it
        does nothing.

        Args:
            elastic: where notices come from.
            node: the name of this node.
            peers: the connections to the other ranks.
            poll_notices: whether this rank polls for the node's notices: one rank per node does.
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
        """Stop watching the other ranks: from now on they may end."""
        self._ended = True

    def end_agent(self) -> None:
        """Ask the agent to end if this machine has a notice: it would start a worker here again."""
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
            time.sleep(_LOOK_S)  # between polls: nothing tells a process that its parent has ended
        self._ask("torchrun's agent has ended")

    def _watch_peers(self, peers: Connections) -> None:
        peers.wait_until_lost()
        time.sleep(_RAISE_S)  # the main thread raises meanwhile, unless it is where nothing tells it
        if not self._ended:
            _say("ends: another rank of its group is gone")
            os._exit(1)

    def _ask(self, reason: str) -> None:
        if not self._reason:
            self._reason = reason
            _say(f"asked to leave ({reason}): the group saves after this step and ends with status {LEFT}")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the agent that reads it may be gone
        os.write(sys.stderr.fileno(), f"springtide, process {os.getpid()}: {text}\n".encode())
