"""What faults at fault points need of a local cluster, beside what a drill needs."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

from springtide.ray.cluster.local import LocalCluster


class FaultCluster(LocalCluster):
    """A local cluster that knows whose a process is, and whose nodes can be stopped for a while."""

    def stop(self, node: str) -> None:
        """Stop all processes of a node (SIGSTOP), as when its host is paused or swaps."""
        self._signal(node, signal.SIGSTOP)

    def resume(self, node: str) -> None:
        """Let the processes of a stopped node go on. Ray may have given the node up meanwhile: then they end."""
        self._signal(node, signal.SIGCONT)

    def node_of(self, pid: int) -> str:
        """Return the node that a process of this machine is part of; empty for the driver, the head and other programs."""
        roots = {root: name for name in self.nodes for root in self._roots(name)}
        while pid > 1 and pid not in roots:
            pid = _parent(pid)
        return roots.get(pid, "")


def _parent(pid: int) -> int:
    """Return the pid of the parent of a process, 0 if it is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
