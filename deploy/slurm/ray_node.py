"""One node of a Ray cluster on Slurm, started by ``srun``: its first one is Ray's head, the others join.

    ray_node.py --cluster FOLDER --head        start the head; write FOLDER/address once it serves
    ray_node.py --cluster FOLDER               wait for FOLDER/address and join; join again where a requeued head has a new one

FOLDER is seen by all nodes, and private: it has the cluster's token, too. Each node says in FOLDER/nodes/NAME what it is in Ray
and has, or in FOLDER/failed/NAME why it cannot join. FOLDER/ended ends all.

Slurm sends SIGTERM to every process of a step when a job is preempted. Ray's own would end at once and take the training with
them, so they are started with SIGTERM blocked; this program passes it on to the batch script's (``allocation.py``).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

PATIENCE_S = 600.0
"""How long a node waits for the head, which may itself be in the queue or on its way to start [s]."""
_LOOK_S = 0.5
_TRIES = 8
"""How often a head is started: one that was too slow, or found its port taken, may be up the next time."""
_FIRST_PORT, _PORTS = 20000, 10000
"""Below what systems give out by themselves, from 32768 on."""
LABEL = "springtide.io/slurm"
_STARTED = "Ray runtime started"
"""What `ray start` prints once the node is in the cluster."""


def say(text: str) -> None:
    """Print a line to the job's log, with the node's name."""
    print(f"{os.environ.get('SLURMD_NODENAME', socket.gethostname())}: {text}", file=sys.stderr, flush=True)


def write(file: Path, text: str) -> None:
    """Write a file that only this user reads; others see the old one or the new one, never a part."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{socket.gethostname()}.{os.getpid()}")
    with open(temporary, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as opened:
        opened.write(text)
    temporary.replace(file)


def free_ports(number: int) -> list[int]:
    """Return ports of this node that nobody listens at, each job and node from a place of its own on."""
    seed = f"{os.environ.get('SLURM_JOB_ID', '')}{os.environ.get('SLURMD_NODENAME', '')}"
    begin, found = zlib.crc32(seed.encode()), []
    for at in range(_PORTS):
        port = _FIRST_PORT + (begin + at) % _PORTS
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            found.append(port)
        if len(found) == number:
            return found
    raise SystemExit(
        f"fewer than {number} ports from {_FIRST_PORT} to {_FIRST_PORT + _PORTS - 1} of this node are free"
    )


def own_address() -> str:
    """Return the address under which other nodes reach this one: that of its Slurm name, else that of its default route."""
    for name in (os.environ.get("SLURMD_NODENAME", ""), socket.gethostname()):
        with contextlib.suppress(OSError):
            address = socket.gethostbyname(name)
            if name and not address.startswith("127."):
                return address
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: the system chooses a route
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def resources() -> list[str]:
    """Return what of this node Slurm has given to the job, as options of ``ray start``; Ray would take the whole machine."""
    cpus = os.environ.get("SLURM_CPUS_ON_NODE", "")
    gpus = os.environ.get("SLURM_GPUS_ON_NODE", "")
    return [*(["--num-cpus", cpus] if cpus else []), *(["--num-gpus", gpus] if gpus else [])]


def blocked(command: list[str]) -> list[str]:
    """Return the command line that runs ``command`` with SIGTERM blocked, and Ctrl-C as a terminal has it."""
    program = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); os.execv(sys.argv[1], sys.argv[1:])"
    )
    return [sys.executable, "-c", program, *command]


def start(head: str, is_head: bool, name: str, folder: str) -> list[str]:
    """Return the command that starts Ray on this node and ends with it."""
    ray = str(Path(sys.executable).with_name("ray"))
    command = [ray, "start", "--block", "--disable-usage-stats", "--node-ip-address", own_address(), *resources()]
    # other jobs, of other users too, may have a Ray on this node
    agent = ["dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent", "metrics-export"]
    ports = free_ports(len(agent) + 2)
    given = [word for kind, port in zip(agent, ports, strict=False) for word in (f"--{kind}-port", str(port))]
    command += ["--min-worker-port", "0", "--max-worker-port", "0", *given, "--temp-dir", folder]
    command += ["--labels", f"{LABEL}={name}", *shlex.split(os.environ.get("SPRINGTIDE_RAY_START", ""))]
    if not is_head:
        return [*command, "--address", head]
    command += ["--head", "--port", head.rpartition(":")[2], "--ray-client-server-port", str(ports[-1])]
    command += ["--dashboard-host", "127.0.0.1", "--dashboard-port", str(ports[-2])]
    return [*command, "--include-dashboard", os.environ.get("SPRINGTIDE_DASHBOARD", "true")]


def ask(head: str, name: str) -> str:
    """Return what the cluster at ``head`` says of the node ``name`` as JSON, empty if it does not know it."""
    import ray

    ray.init(address=head, log_to_driver=False, logging_level="ERROR")
    for node in ray.nodes():
        if node["Alive"] and node["Labels"].get(LABEL) == name:
            return json.dumps({"node": node["NodeID"], "resources": node["Resources"]})
    return ""


def descendants(pid: int) -> Iterator[int]:
    """Yield the pids of all processes below ``pid``."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                yield child
                yield from descendants(child)


def end(process: subprocess.Popen[bytes]) -> None:
    """End Ray on this node at once: what it had to do is done."""
    for pid in [process.pid, *descendants(process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


class Node:
    """Ray on this node, from its start to its end."""

    def __init__(self, cluster: Path, name: str, meeting: str, is_head: bool) -> None:
        """``meeting``: what FOLDER/address says, or shall say: the head's address, and when it began."""
        self.cluster, self.name, self.meeting, self.is_head = cluster, name, meeting, is_head
        self.head = meeting.split()[0]
        self.joined = False

    def live(self) -> str:
        """Run until Ray ends, the cluster ends or the head is another; returns why it ended, empty for the cluster's end."""
        # short: the paths of Ray's sockets have a limit of 107 characters
        with tempfile.TemporaryDirectory(prefix="tide-", ignore_cleanup_errors=True) as folder:
            log = Path(folder, "start.log")
            command = blocked(start(self.head, self.is_head, self.name, folder))
            with log.open("wb") as file:
                process = subprocess.Popen(command, stdout=file, stderr=file)
            begun_s = time.monotonic()
            try:
                while process.poll() is None:
                    if (self.cluster / "ended").exists():
                        return ""
                    if not self.is_head and read(self.cluster / "address") not in ("", self.meeting):
                        return "the head is another"
                    if not self.joined and _STARTED in read(log):
                        self._join()
                        say(f"in the Ray cluster at {self.head} after {time.monotonic() - begun_s:.0f} s")
                    time.sleep(_LOOK_S)  # between polls: a shared file system tells nobody of changes
            finally:
                end(process)
                (self.cluster / "nodes" / self.name).unlink(missing_ok=True)
            lines = read(log).strip().splitlines() or ["it says nothing"]
            say("\n".join(["what `ray start` says:", *lines[-20:]]))
            return f"Ray ended with status {process.returncode}: {lines[-1]}"

    def _join(self) -> None:
        # in a process of its own: Ray would take this one's signals, and connect only once
        asks = blocked([sys.executable, __file__, "--cluster", str(self.cluster), "--ask", self.head, self.name])
        done = subprocess.run(asks, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip():
            self.joined = True
            write(self.cluster / "nodes" / self.name, done.stdout)
            if self.is_head:
                write(self.cluster / "address", self.meeting)


def read(file: Path) -> str:
    """Return the text of a file, empty if there is none."""
    with contextlib.suppress(FileNotFoundError):
        return file.read_text()
    return ""


def stay(options: argparse.Namespace, name: str, is_head: bool) -> str:
    """Be a node of the cluster until that ends, under one head after another; returns what went wrong, empty if nothing."""
    where, gone, alone_s, tries = options.cluster / "address", "", time.monotonic(), 0
    why = f"no head has written {where}: is the folder seen here, does a head run?"
    while not (options.cluster / "ended").exists() and time.monotonic() - alone_s < PATIENCE_S:
        meeting = f"{own_address()}:{free_ports(7)[-1]} {time.time_ns()}" if is_head else read(where)
        if not meeting or meeting == gone:
            time.sleep(_LOOK_S)  # between polls
            continue
        node = Node(options.cluster, name, meeting, is_head)
        why = node.live()
        tries += 1
        if not why or (is_head and (node.joined or tries == _TRIES)):
            return why
        if node.joined:
            say(f"{why}; waits for the next head")
            gone, alone_s = meeting, time.monotonic()
    return f"not in a cluster for {PATIENCE_S:.0f} s: {why}" if not (options.cluster / "ended").exists() else ""


def main() -> int:
    """Run one node; the exit status is 0 if the cluster ended, 2 if Ray is not installed, 1 for other problems."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", type=Path, required=True, help="the folder of the cluster")
    parser.add_argument("--head", action="store_true", help="start the head where srun's rank is 0")
    parser.add_argument("--batch", type=int, default=0, help="pid on the first node that gets SIGTERM passed on")
    parser.add_argument("--ask", nargs=2, metavar=("HEAD", "NAME"), help="print what HEAD's cluster knows of node NAME")
    options = parser.parse_args()
    if options.ask:
        print(ask(*options.ask))
        return 0
    first = os.environ.get("SLURM_PROCID", "0") == "0"
    name = f"{os.environ.get('SLURM_JOB_ID', '0')}-{os.environ.get('SLURMD_NODENAME', socket.gethostname())}"
    if not importlib.util.find_spec("ray"):
        why = f"Ray is not installed for {sys.executable} on this node: pip install 'springtide[ray]' there"
        say(why)
        write(options.cluster / "failed" / name, why)
        return 2

    def pass_on(number: int, frame: object) -> None:
        if first and options.batch:
            with contextlib.suppress(ProcessLookupError):
                os.kill(options.batch, signal.SIGTERM)

    signal.signal(signal.SIGTERM, pass_on)
    os.environ.pop("RAY_AUTH_TOKEN", None)  # it would come before the file's
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(options.cluster / "auth_token")}
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "300")
    if why := stay(options, name, options.head and first):
        write(options.cluster / "failed" / name, why)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
