"""Run a job of springtide on a Slurm allocation: Ray on its nodes, the driver beside the head. Called by the batch scripts.

    allocation.py train|sweep OPTIONS...    the options of `springtide train` and `springtide sweep`

A job array is one cluster: task 0 has the head and the driver, each other task is a node that joins, and joins again. Arrays
that are submitted with the same SPRINGTIDE_CLUSTER are one cluster, too.

What Slurm announces (SIGTERM to the batch script by ``--signal=B:TERM@120``, to the nodes' steps at a preemption):

    task 0, or no array         the driver saves a checkpoint and ends; then the job is requeued, and resumes
    another task of an array    its node is drained for as long as Slurm leaves it: training leaves it in time; then as above

A job that Slurm itself requeues or kills finds what was saved; a job that the user cancels saves, and is not requeued.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ray_node import blocked, read, say, write

JOINED_S = 600.0
"""How long the nodes of an allocation may take until all are in the cluster [s]."""
_LOOK_S = 0.5
_LEAVE_S = 5.0
"""How long before Slurm kills it a drained node ends by itself [s]."""
_INTERRUPTED = (130, -signal.SIGINT)
"""Status of a driver that was asked to end before there was something to save."""
_REPOSITORY = Path(__file__).parents[2]


class Refused(Exception):
    """The job cannot work; the message says why, and what to do."""


def slurm(*command: str) -> str:
    """Return what a command of Slurm prints, empty if it fails: its controller may be away."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        say(f"{command[0]} failed: {error}")
        return ""


def seconds(left: str) -> float:
    """Return the seconds of a duration as Slurm prints it: [days-][[hours:]minutes:]seconds; infinite for other words.

    >>> seconds("1-02:00:30"), seconds("4:05"), seconds("UNLIMITED")
    (93630.0, 245.0, inf)
    """
    days, _, rest = left.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in (days or "0", *parts)):
        return float("inf")
    clock = sum(int(part) * 60**at for at, part in enumerate(reversed(parts)))
    return float(int(days or "0") * 86400 + clock)


def left_s() -> float:
    """Return how long this job still has [s]: to the end of its grace time or time limit, else to its kill."""
    found = told(slurm("scontrol", "show", "job", to_slurm()))
    left = float("inf")
    if found.get("JobState") == "RUNNING":
        left = seconds(slurm("squeue", "--noheader", "--jobs", to_slurm(), "--format=%L"))
        preempted = found.get("PreemptTime", "")
        if preempted[:1].isdigit():  # a job without a time limit has no end that a preemption could bring nearer
            grace = told(slurm("scontrol", "show", "partition", found["Partition"])).get("GraceTime", "0")
            since_s = time.time() - datetime.datetime.fromisoformat(preempted).timestamp()
            left = min(left, float(grace) - since_s)
    if left < float("inf"):
        return max(0.0, left)
    for line in slurm("scontrol", "show", "config").splitlines():
        if line.startswith("KillWait"):
            return float(line.split()[2])
    return 30.0  # Slurm's own KillWait


def told(text: str) -> dict[str, str]:
    """Return the fields of what scontrol prints.

    >>> told("JobState=RUNNING Reason=None")["JobState"]
    'RUNNING'
    """
    return {name: value for name, _, value in (part.partition("=") for part in text.split())}


def job() -> str:
    """Return this job's id; each task of an array has one of its own."""
    return os.environ["SLURM_JOB_ID"]


def to_slurm() -> str:
    """Return what Slurm's commands call this job: the id of one task of an array is also that of the whole array."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID", ""), os.environ.get("SLURM_ARRAY_TASK_ID", "")
    return f"{array}_{task}" if array else job()


def room(nodes: Sequence[Mapping[str, Mapping[str, float]]], cpus: float, gpus: float) -> int:
    """Return how many workers of ``cpus`` and ``gpus`` fit on the nodes.

    >>> room([{"resources": {"CPU": 8.0, "GPU": 2.0}}, {"resources": {"CPU": 8.0}}], 1.0, 1.0)
    2
    """
    wanted = {"CPU": cpus, "GPU": gpus}
    return sum(
        min(int(node["resources"].get(kind, 0.0) // amount) for kind, amount in wanted.items() if amount > 0)
        for node in nodes
    )


def check_room(nodes: Sequence[Mapping[str, Mapping[str, float]]], arguments: Sequence[str]) -> None:
    """Raise Refused if the allocation cannot hold the fewest workers that the run trains with: it would wait for ever."""
    from springtide.cli.main import parser
    from springtide.cli.options import config_of

    elastic = config_of(parser(show_all=True).parse_args([*arguments])).elastic
    has = room(nodes, elastic.cpus_per_worker, elastic.gpus_per_worker)
    if has < elastic.min_workers:
        raise Refused(
            f"elastic.min_workers = {elastic.min_workers}: {len(nodes)} node(s) of this allocation have room for {has} "
            f"worker(s) of {elastic.cpus_per_worker:g} CPU and {elastic.gpus_per_worker:g} GPU; ask for more (sbatch --nodes, "
            "--cpus-per-task, --gpus-per-node) or lower elastic.min_workers"
        )


def command_of(arguments: Sequence[str]) -> list[str]:
    """Return the driver's command line, which begins what it has not begun before and else resumes it. Raises Refused."""
    kind, *options = arguments or [""]
    if kind not in ("train", "sweep"):
        raise Refused(f"{kind!r} is neither train nor sweep: give one of them, and then its options")
    named = "--run.id" if kind == "train" else "--name"
    given = [option.partition("=")[0] for option in options]
    if named not in given and "--config" not in given:
        raise Refused(f"give {named} NAME: by that name a requeued job finds what it has begun")
    return [sys.executable, str(_REPOSITORY / "jobs" / f"{kind}.py"), *options]


class Cluster:
    """The nodes of this job: one ``srun`` of ``ray_node.py`` on each."""

    def __init__(self, folder: Path, is_head: bool) -> None:
        self.folder, self.is_head = folder, is_head
        program = Path(__file__).with_name("ray_node.py")
        command = [sys.executable, str(program), "--cluster", str(folder), "--batch", str(os.getpid())]
        command += ["--head"] if is_head else []
        tasks = os.environ["SLURM_JOB_NUM_NODES"]
        # a node that is lost, or whose Ray ends, takes no other with it: training goes on without it
        keep = ["--no-kill", "--kill-on-bad-exit=0", "--unbuffered", "--cpu-bind=none"]
        # srun gets no signal but Slurm's own: one that stops it would stop all nodes
        self.srun = subprocess.Popen(
            ["srun", f"--nodes={tasks}", f"--ntasks={tasks}", "--ntasks-per-node=1", *keep, *command],
            start_new_session=True,
        )

    def nodes(self) -> list[Mapping[str, Mapping[str, float]]]:
        """Return what the nodes of this job say of themselves."""
        files = (self.folder / "nodes").glob(f"{job()}-*") if (self.folder / "nodes").exists() else ()
        return [json.loads(text) for text in map(read, files) if text]

    def wait(self, asked: threading.Event) -> None:
        """Wait until each node of this job is in the cluster, or ``asked`` is set. Raises Refused if one cannot be."""
        wanted, until_s = int(os.environ["SLURM_JOB_NUM_NODES"]), time.monotonic() + JOINED_S
        while not asked.is_set() and (has := len(self.nodes())) < wanted:
            failed = sorted((self.folder / "failed").glob(f"{job()}-*")) if (self.folder / "failed").exists() else []
            if failed:
                raise Refused("; ".join(f"{file.name}: {read(file)}" for file in failed))
            if (status := self.srun.poll()) is not None:
                raise Refused(
                    f"srun ended with status {status} before Ray ran: its messages are above; is {sys.executable} there?"
                )
            if time.monotonic() > until_s and self.is_head:
                raise Refused(
                    f"{has} of {wanted} nodes are in the cluster after {JOINED_S:.0f} s: do all have {sys.executable}, and see "
                    f"{self.folder}? Their messages are above"
                )
            asked.wait(_LOOK_S)

    def end(self, all_tasks: bool) -> None:
        """End Ray on the nodes of this job; ``all_tasks``: of the other tasks of the array, too."""
        if all_tasks:
            write(self.folder / "ended", "")
        else:  # the nodes of other tasks stay: they join the next head
            slurm("scancel", "--signal=KILL", f"{to_slurm()}.0")
        try:
            self.srun.wait(30)
        except subprocess.TimeoutExpired:
            slurm("scancel", "--signal=KILL", f"{to_slurm()}.0")


def requeue() -> None:
    """Put this job back into the queue, unless Slurm has done so or its user has cancelled it."""
    state = slurm("squeue", "--noheader", "--jobs", to_slurm(), "--format=%T")
    say(f"this job is {state or 'gone'}" + (": back into the queue" if state == "RUNNING" else ""))
    if state == "RUNNING":
        slurm("scontrol", "requeue", to_slurm())


def drive(cluster: Cluster, arguments: Sequence[str], asked: threading.Event, is_array: bool) -> int:
    """Run the driver to its end; returns its exit status."""
    command = command_of(arguments)
    cluster.wait(asked)
    if asked.is_set():
        return 0
    if arguments[0] == "train" and not is_array:
        check_room(cluster.nodes(), arguments)
    driver = subprocess.Popen(
        blocked(command),
        env=os.environ | {"RAY_ADDRESS": read(cluster.folder / "address").split()[0]},
    )
    told = False
    while driver.poll() is None:
        if asked.is_set() and not told:
            told = True
            say(f"this job is to end in {left_s():.0f} s: the driver saves and ends")
            driver.send_signal(signal.SIGINT)
        time.sleep(_LOOK_S) if told else asked.wait(_LOOK_S)
    return driver.returncode


def lend(cluster: Cluster, asked: threading.Event) -> None:
    """Lend this task's node to the cluster until that ends, or drain it when Slurm takes it away."""
    while cluster.srun.poll() is None and not asked.is_set():
        asked.wait(_LOOK_S)
    if not asked.is_set():
        return
    left = left_s()
    say(f"this node is to leave in {left:.0f} s")
    head = (read(cluster.folder / "address").split() or [""])[0]
    for node in cluster.nodes():
        ray = str(Path(sys.executable).with_name("ray"))
        drain = [ray, "drain-node", "--address", head, "--node-id", str(node["node"]), "--reason"]
        drain += [
            "DRAIN_NODE_REASON_PREEMPTION",
            "--reason-message",
            "Slurm takes the node",
            "--deadline-remaining-seconds",
        ]
        begun_s = time.monotonic()
        subprocess.run([*drain, str(int(left))], check=False)
        left -= time.monotonic() - begun_s
    try:
        cluster.srun.wait(max(0.0, left - _LEAVE_S))
    except subprocess.TimeoutExpired:
        say("the notice is over")


def folder_of() -> Path:
    """Return this job's folder, which all nodes see; private, with a token for Ray. Raises Refused."""
    own = f"slurm-{os.environ.get('SLURM_ARRAY_JOB_ID', job())}"
    home = Path.home() / ".springtide" / os.environ.get("SPRINGTIDE_CLUSTER", own)
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (home / "auth_token").exists():
            write(home / "auth_token", secrets.token_hex(32))
    except OSError as error:
        remedy = "nodes meet there, and find the token; set HOME to a folder that all nodes see"
        raise Refused(f"{home} cannot be written ({error}): {remedy}") from None
    return home


def main() -> int:
    """Run the job; the exit status is the driver's, 2 if the job cannot work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="train or sweep, and its options")
    options = parser.parse_args()
    asked, cluster, again = threading.Event(), None, False
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: asked.set())
    try:
        if "SLURM_JOB_ID" not in os.environ:
            raise Refused("SLURM_JOB_ID is not set: submit this with sbatch, as deploy/slurm/train.sbatch says")
        task = os.environ.get("SLURM_ARRAY_TASK_ID", "")
        is_head = task in ("", "0")
        command_of(options.arguments)
        folder = folder_of()
        os.environ.pop("RAY_AUTH_TOKEN", None)  # it would come before the file's
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "auth_token")}
        if is_head:
            shutil.rmtree(folder / "nodes", ignore_errors=True)
            for name in ("address", "ended"):
                (folder / name).unlink(missing_ok=True)
        for file in (folder / "failed").glob(f"{job()}-*"):
            file.unlink()
        cluster = Cluster(folder, is_head)
        if not is_head:
            lend(cluster, asked)
            again = asked.is_set() and not (folder / "ended").exists()
            return 0
        status = drive(cluster, options.arguments, asked, bool(task))
        again = asked.is_set() and status in (0, *_INTERRUPTED)
        return status
    except Refused as why:
        say(f"refused: {why}")
        return 2
    finally:
        if cluster:
            cluster.end(all_tasks=cluster.is_head and not again)
        if again:
            requeue()


if __name__ == "__main__":
    sys.exit(main())
