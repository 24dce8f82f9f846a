"""A real Slurm on this machine: its controller and two nodes, in a folder of their own. Needs slurmctld, slurmd and munged
on the path, as the packages of these names on Debian bring them, and root: nodes of Slurm start jobs as their users.

    partition spot      of lower priority: its jobs are requeued for others, GRACE_S after they were told
    partition urgent    of higher priority
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ports import reserve

GRACE_S = 60
"""Between what tells a job that it is preempted, and its kill [s]."""
NODES = ("n1", "n2")
_PROGRAMS = ("slurmctld", "slurmd", "munged")


def why_not() -> str:
    """Why this machine cannot run Slurm; empty if it can."""
    missing = [name for name in _PROGRAMS if not shutil.which(name)]
    if missing:
        return f"not on the path: {', '.join(missing)} (Debian: slurmctld slurmd slurm-client munge)"
    return "" if os.getuid() == 0 else "Slurm's nodes need root"


class Slurm:
    """The commands of a running Slurm."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def __call__(self, *command: str, at: Path | None = None, more: Mapping[str, str] | None = None) -> str:
        """What a command prints; it must end well."""
        environment = os.environ | self.environment | (more or {})
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=at, env=environment)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, *arguments: str, at: Path | None = None, more: Mapping[str, str] | None = None) -> str:
        """The id of a new job."""
        return self("sbatch", "--parsable", *arguments, at=at, more=more)

    def state(self, job: str) -> str:
        """A job's state in Slurm's words."""
        return self("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")

    def wait(self, until: Callable[[], object], patience_s: float, what: str) -> None:
        """Wait for an event of another process."""
        end_s = time.monotonic() + patience_s
        while not until():
            assert time.monotonic() < end_s, (
                f"{what} did not come in {patience_s:.0f} s: {self('squeue', '--states=all')}"
            )
            time.sleep(0.5)  # between polls


def settings(folder: Path, munge: Path, ports: Sequence[int]) -> str:
    """The text of slurm.conf."""
    here = socket.gethostname().partition(".")[0]
    plugins = next(Path(str(shutil.which("slurmctld"))).resolve().parents[1].glob("lib/*/slurm-wlm"), None)
    nodes = "".join(
        f"NodeName={name} NodeHostname={here} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=4000\n"
        for name, port in zip(NODES, ports[1:], strict=True)
    )
    every = ",".join(NODES)
    return f"""
ClusterName=try
SlurmctldHost={here}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge}
{f"PluginDir={plugins}" if plugins else ""}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=20
MinJobAge=3600
SlurmdParameters=config_overrides
{nodes}
PartitionName=spot Nodes={every} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={GRACE_S}
PartitionName=urgent Nodes={every} PriorityTier=10 PreemptMode=OFF
"""


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """A running Slurm; all its jobs end with the block."""
    (folder / "state").mkdir(parents=True)
    (folder / "munge").mkdir(mode=0o755)
    key, munge = folder / "munge" / "key", folder / "munge" / "socket"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    (folder / "slurm.conf").write_text(settings(folder, munge, reserve(1 + len(NODES))))
    found = Slurm(folder)
    stepd = shutil.which("slurmstepd") or "/usr/sbin/slurmstepd"
    commands = {
        "munged": ["munged", "--force", "--foreground", f"--key-file={key}", f"--socket={munge}", "--num-threads=2"]
        + [f"--{kind}={folder}/munge/{kind}" for kind in ("pid-file", "log-file", "seed-file")],
        "slurmctld": ["slurmctld", "-D"],
        **{name: ["slurmd", "-D", "-N", name, "-d", stepd] for name in NODES},
    }
    with contextlib.ExitStack() as stack:
        for name, command in commands.items():
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | found.environment)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            if name == "munged":
                found.wait(munge.exists, 30, "munged's socket")
        found.wait(lambda: _idle(found) == len(NODES), 60, "the nodes")
        try:
            yield found
        finally:
            with contextlib.suppress(AssertionError):  # the controller may be the one that failed
                found("scancel", "--signal=KILL", "--user=root")
                found("scancel", "--user=root")
                found.wait(lambda: not found("squeue", "--noheader"), 60, "the end of all jobs")


def _idle(found: Slurm) -> int:
    """How many nodes are idle; 0 while the controller is not there."""
    with contextlib.suppress(AssertionError):
        return found("sinfo", "--noheader", "--Node", "--partition=spot", "--format=%T").split().count("idle")
    return 0
