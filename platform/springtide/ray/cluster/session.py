"""The Ray cluster to train on: the one that the user names (RAY_ADDRESS), or a private cluster that lives as long as the run.

We never join a cluster that the user did not name. A private cluster keeps its files in a folder of its own. If they were in
Ray's usual folder, other drivers that look for the last cluster started would join it. (``ray.init("auto")`` elsewhere on the
machine may still find its process.)
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple, Self

import ray
from ray.exceptions import AuthenticationError, RayError
from ray.job_config import JobConfig

from springtide.config import Config
from springtide.errors import ConfigError, explain, in_one_line
from springtide.events import Event, StepDone
from springtide.ray._ray_private import (
    LOOPBACK,
    SUPPORTED,
    GcsClient,
    few_head_processes,
    is_supported,
    is_token_auth_enabled,
    keep_current_folder_out,
    read_authentication,
    searched_first,
    start_dashboard,
    stay_on_loopback,
)
from springtide.ray.cluster import reaper
from springtide.ray.names import job_metadata

_DEVICE_GB = {"V100": 32, "T4": 16, "L4": 24, "A10G": 24, "L40S": 48, "A100": 80, "H100": 80, "H200": 141, "B200": 180}
"""Memory of each kind of GPU by Ray's name for it, from the makers' data sheets; the largest variant of each kind [GB]."""
_WITHOUT_BF16 = ("K80", "P100", "P4", "V100", "T4")
"""Devices older than Ampere: they emulate bf16, slower than fp32."""
_WITHOUT_FP8 = (*_WITHOUT_BF16, "A100", "A100-40G", "A100-80G", "A10G", "A10", "A6000")
"""Devices up to Ampere: they have no 8-bit matrix multiplication."""
_SAFE_PATH = "PYTHONSAFEPATH"
_RAY_FOLDER = "RAY_TMPDIR"
_PREFIX = "springtide-ray-"
_STORE_BYTES = 512 * 2**20
NAMESPACE = "springtide"
_SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable that Ray sets for a driver started by `ray job submit`."""

# Ray Train reads RAY_TRAIN_ENABLE_STATE_TRACKING in the driver: without it the dashboard's Train page is empty
_ENVIRONMENT = {
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    # the controller runs in the driver, which configures its own logging
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
    # turn off Ray's own watcher, which waits for the deadline: ours acts on a preemption notice at once
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # Tune prints its tables at any verbosity, and its loggers write each result three times: turn both off
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    # a worker keeps the one device of its actor: otherwise Ray would extend CUDA_VISIBLE_DEVICES after CUDA has read it, and
    # the worker would select a wrong device by its index in the longer list
    "TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES": "0",
    # run workers at nice 0: at Ray's default of 15, Ray's own services would preempt them on a machine whose cores all train
    "RAY_worker_niceness": "0",
}

_PRIVATE_ENVIRONMENT = {
    # Off on a private cluster: Ray Train records its runs in an actor that takes core-seconds to start, for a dashboard page
    # that is empty in Ray 2.60. It also looks for the driver in the cluster that /tmp/ray/ray_current_cluster names. If that
    # file names another cluster or a dead one, the run's last report waits 30 to 40 s
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
}


def set_environment(**more: str) -> None:
    """Set Ray's environment variables for this process and those it starts. Variables that are set already keep their
    values."""
    for name, value in {**_ENVIRONMENT, **more}.items():
        os.environ.setdefault(name, value)
    # hide a warning that Ray's own code causes
    warnings.filterwarnings("ignore", message="`ExecutionOptions.exclude_resources`")


@contextlib.contextmanager
def temporary_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that are started in the block. Variables that are set already keep their
    values."""
    missing = values.keys() - os.environ.keys()
    os.environ.update({name: values[name] for name in missing})
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def check_version(version: str) -> None:
    """Raise ConfigError if this version of Ray is not in ``SUPPORTED``: this package uses private parts of Ray."""
    if not is_supported(version):
        first, end = (".".join(map(str, bound)) for bound in SUPPORTED)
        limit = f"is not supported: this version of springtide needs Ray >= {first} and < {end}"
        raise ConfigError(explain("ray", version, limit, f"pip install 'ray>={first},<{end}'"))


def is_private() -> bool:
    """Return True if ``cluster`` would start a private cluster: there is no connection to Ray, and ``RAY_ADDRESS`` is not
    set."""
    return not ray.is_initialized() and not os.environ.get("RAY_ADDRESS")


@contextlib.contextmanager
def starting_cluster(config: Config) -> Iterator[Callable[[], str]]:
    """Connect like ``cluster``, but start a private cluster in a thread while this process does other work. Yields a function
    that waits until this process is connected, and returns the dashboard's URL. The URL is empty for a private cluster, whose
    dashboard ``LateDashboard`` starts later."""
    with contextlib.ExitStack() as stack:
        if not is_private():
            yield lambda: stack.enter_context(cluster(config))
            return
        pool = stack.enter_context(ThreadPoolExecutor(1, "springtide-ray"))
        ray_ends = stack.enter_context(contextlib.ExitStack())
        started = pool.submit(ray_ends.enter_context, cluster(config, dashboard=False))
        stack.callback(wait, [started])
        with _ends_on_sigterm():
            yield started.result


@contextlib.contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """Make SIGTERM raise SystemExit in the block. Ray installs such a handler itself, but only if it is started in the main
    thread."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def cluster(config: Config, *, dashboard: bool = True, metadata: Mapping[str, str] | None = None) -> Iterator[str]:
    """Connect to a Ray cluster for the block. Yields the dashboard's URL, empty without a dashboard.

    Uses the caller's connection if there is one; else the cluster that ``RAY_ADDRESS`` names, as under ``ray job submit``;
    else starts a private one with at least the logical CPUs that the workers need, and this machine's GPUs. ``metadata``: shown
    by ``ray list jobs --detail``; by default it describes the config's run. The caller's connection keeps its metadata.
    """
    check_version(ray.__version__)
    with temporary_environment(_PRIVATE_ENVIRONMENT if is_private() else {}):
        set_environment()
        with _connected(config, dashboard, metadata) as url:
            yield url


@contextlib.contextmanager
def _connected(config: Config, dashboard: bool, metadata: Mapping[str, str] | None) -> Iterator[str]:
    quiet: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
    if _SUBMITTED not in os.environ:  # `ray job submit` has set the job's metadata already
        quiet["job_config"] = job = JobConfig(metadata=dict(metadata or job_metadata(config)))
        # workers of a named cluster start in another folder, and may need this process's folder to import the user's own
        # modules
        is_elsewhere = "RAY_ADDRESS" in os.environ
        if not (is_elsewhere and config.needs_trust | config.prepare_sources):
            keep_current_folder_out(job)
    if ray.is_initialized():
        yield ""
    elif address := os.environ.get("RAY_ADDRESS"):
        url = connect(address, **quiet)
        try:
            yield url
        finally:
            ray.shutdown()
    else:
        with private_folder() as folder, private_network(folder):
            cpus = round(config.elastic.max_workers * config.elastic.cpus_per_worker + 0.5)
            fewer = contextlib.nullcontext() if dashboard else few_head_processes()
            with _safe_path(), _in_one_sentence(), fewer:
                context = ray.init(
                    address="local",
                    num_cpus=max(os.cpu_count() or 1, cpus),
                    include_dashboard=dashboard,
                    object_store_memory=_STORE_BYTES,
                    _temp_dir=files_of_ray(folder),
                    **quiet,
                )
            try:
                yield context.dashboard_url or ""
            finally:
                ray.shutdown()


@contextlib.contextmanager
def _in_one_sentence() -> Iterator[None]:
    """Convert any error in the start of Ray to a ConnectionError of one sentence. The usual one: Ray's processes do not start
    within Ray's limit of 30 seconds."""
    try:
        yield
    except Exception as error:
        problem = f"Ray did not start on this machine ({in_one_line(error)})"
        raise ConnectionError(
            f"{problem}; try again when the machine is less busy, and look at its free memory"
        ) from error


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Keep the processes that Ray starts in the block from importing modules from the current folder, unless this process
    imports from there itself. A part of Ray's dashboard is started as ``python -c``, which would import from there."""
    if os.getcwd() in searched_first() or _SAFE_PATH in os.environ:
        yield
        return
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        del os.environ[_SAFE_PATH]


@contextlib.contextmanager
def named_cluster() -> Iterator[None]:
    """For the block, connect to the cluster that ``RAY_ADDRESS`` names, or use the caller's connection. Raises ConfigError if
    there is no connection and the variable is not set."""
    address = os.environ.get("RAY_ADDRESS", "")
    if ray.is_initialized():
        yield
        return
    if not address:
        remedy = "set it to the address of the cluster, such as 10.0.0.5:6379, or to auto on one of its nodes"
        raise ConfigError(explain("RAY_ADDRESS", address, "names no cluster", remedy))
    set_environment()
    connect(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def dashboard_hint() -> str:
    """Return a hint for the user that names the command which prints the dashboard's token; empty if the dashboard needs no
    token."""
    if not is_token_auth_enabled():
        return ""
    file = os.environ.get(TOKEN_FILE)
    command = f"cat {file}" if file else os.path.join(os.path.dirname(sys.executable), "ray") + " get-auth-token"
    return f" (it asks for a token: `{command}` prints it)"


@contextlib.contextmanager
def private_folder() -> Iterator[str]:
    """Yield a temporary folder for a private cluster. When the block or this process ends, even by SIGKILL, the folder is
    removed, and the cluster's processes that use it are ended."""
    folder = tempfile.mkdtemp(prefix=_PREFIX)
    # the reaper (it cleans up after this process) runs in its own session, so that Ctrl-C at the terminal reaches only the
    # driver
    watcher = subprocess.Popen(
        [sys.executable, "-I", reaper.__file__, folder], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        with _variables({reaper.MARK: folder}):
            yield folder
    finally:
        assert watcher.stdin is not None
        watcher.stdin.close()
        watcher.wait()


def files_of_ray(folder: str) -> str:
    """Return the folder for Ray's files inside a private ``folder``. Ray makes it writable for every user of the machine, but
    no other user can enter ``folder``."""
    return os.path.join(folder, "ray")


@contextlib.contextmanager
def own_address_file(folder: str) -> Iterator[None]:
    """Make Ray's cluster utility write its address file into ``folder`` in the block. By default the file goes to Ray's folder,
    where every driver of this machine finds it. That would hide the user's own cluster, and it fails on a machine where Ray has
    never run."""
    os.makedirs(files_of_ray(folder))
    with _variables({_RAY_FOLDER: folder}):
        yield


@contextlib.contextmanager
def private_network(folder: str) -> Iterator[None]:
    """Make a Ray cluster that is started in the block listen on the loopback address, and refuse clients without the token in
    ``folder``, because Ray runs code for its clients. An authentication mode or token that the user has set stays."""
    mode = os.environ.get(AUTH_MODE, "token")
    values = {AUTH_MODE: mode, **LOOPBACK}
    if mode.lower() == "token" and not os.environ.keys() & {TOKEN, TOKEN_FILE}:
        values[TOKEN_FILE] = os.path.join(folder, "auth_token")
        with open(values[TOKEN_FILE], "x", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(secrets.token_hex(32))
    with contextlib.ExitStack() as stack:
        stack.callback(read_authentication)
        stack.enter_context(_variables(values))
        stack.enter_context(stay_on_loopback())
        read_authentication()
        yield


def without_tune_signals() -> contextlib.AbstractContextManager[None]:
    """Keep Ray Tune, if it is started in the block, from handling SIGINT: its handler would end the trials' processes before
    they have saved anything."""
    return _variables({"TUNE_DISABLE_SIGINT_HANDLER": "1"})


@contextlib.contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables in the block, and restore the old values at its end."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def device_size(config: Config) -> DeviceSize:
    """Return the memory of one worker on the cluster's largest device: measured there, or from the data sheet if no device is
    free. Without GPUs it is one worker's share of the largest node's memory; 0 if unknown."""
    elastic = config.elastic
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if elastic.gpus_per_worker:
        kinds, share_of_one = _kinds(nodes), min(1.0, elastic.gpus_per_worker)
        sheets = [DeviceSize(round(_DEVICE_GB[kind] * 1e9)) for kind in kinds if kind in _DEVICE_GB]
        total, used = max(device_sizes(kinds, elastic.gpus_per_worker) or sheets, default=DeviceSize())
        return DeviceSize(int(total * share_of_one), used)

    def share(node: dict[str, float]) -> int:
        workers = max(1, min(elastic.max_workers, int(node.get("CPU", 0) // elastic.cpus_per_worker)))
        return int(node.get("memory", 0)) // workers

    large = (share(node) for node in nodes if node.get("CPU", 0) >= elastic.cpus_per_worker)
    return DeviceSize(max(large, default=0))


def worker_speed(config: Config, vocab_size: int) -> float:
    """Measure the speed of one worker on the cluster, with a few training steps [tokens/s]."""
    elastic = config.elastic
    name = f"{config.run.id or 'springtide'}/measure-speed"
    measure = ray.remote(_speed).options(name=name, num_cpus=elastic.cpus_per_worker, num_gpus=elastic.gpus_per_worker)
    found: float = ray.get(measure.remote(config, vocab_size))
    return found


def _speed(config: Config, vocab_size: int) -> float:
    from springtide.training.preflight import measure_throughput

    return measure_throughput(config, vocab_size)


def _kinds(nodes: Sequence[dict[str, float]]) -> list[str]:
    """Return Ray's names of the kinds of GPU on ``nodes``, such as ['A100', 'H100']. ``nodes``: the resources of each node."""
    return sorted({name.partition(":")[2] for node in nodes for name in node if name.startswith(ACCELERATOR)})


def check_precision(config: Config, nodes: Sequence[dict[str, float]]) -> None:
    """Raise ConfigError if a kind of GPU on ``nodes`` cannot compute in the config's precision. With float8, also raise it if
    this machine lacks the package that float8 needs. ``nodes``: the resources of each node."""
    precision, is_float8 = config.parallel.precision, bool(config.parallel.float8)
    if is_float8:
        from springtide.distributed.float8 import check_installed

        check_installed(precision)
    poor = [kind for kind in _kinds(nodes) if kind in (_WITHOUT_FP8 if is_float8 else _WITHOUT_BF16)]
    if config.elastic.gpus_per_worker and config.parallel.computes_in == "bf16" and poor:
        limit = (
            f"the cluster has {' and '.join(poor)} devices, which have no {'fp8' if is_float8 else 'bf16'} arithmetic"
        )
        other = "bf16" if is_float8 else "fp16"
        raise ConfigError(
            explain("parallel.precision", precision, limit, f"use {other}, or only nodes with newer devices")
        )


def check_before_start(config: Config) -> None:
    """Raise ConfigError if this machine, on which a private cluster would start, has too few GPUs for one worker. Starts
    nothing and queries no cluster; ``check_resources`` checks a cluster that is running."""
    wanted = config.elastic.gpus_per_worker
    if not wanted or ray.is_initialized() or os.environ.get("RAY_ADDRESS"):
        return
    import torch

    from springtide.distributed import why_no_gpu

    has = torch.cuda.device_count()
    if has < wanted:
        why = "" if has else f" ({why_no_gpu()})"
        raise ConfigError(
            explain(
                "elastic.gpus_per_worker",
                wanted,
                f"torch sees {has or 'no'} GPU{'s' * (has > 1)} on this machine{why}, "
                "and RAY_ADDRESS names no cluster to train on",
                "submit the run to a cluster that has GPUs (RAY_ADDRESS, or ray job submit), or train a small recipe on "
                "CPUs: --recipe demo, or --elastic.gpus-per-worker 0",
            )
        )


def check_resources(config: Config) -> list[str]:
    """Raise ConfigError if no node of the cluster can hold one worker, or a device cannot compute in the config's precision.
    Returns warnings for the user, such as that devices differ in speed; an empty list if there are none."""
    elastic = config.elastic
    wanted = {"CPU": elastic.cpus_per_worker, "GPU": elastic.gpus_per_worker}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    check_precision(config, nodes)
    if not any(all(node.get(kind, 0) >= amount for kind, amount in wanted.items()) for node in nodes):
        largest = {kind: max((node.get(kind, 0) for node in nodes), default=0) for kind in wanted}
        short, other = ("gpus", "cpus") if largest["GPU"] < elastic.gpus_per_worker else ("cpus", "gpus")
        raise ConfigError(
            explain(
                f"elastic.{short}_per_worker",
                getattr(elastic, f"{short}_per_worker"),
                f"with elastic.{other}_per_worker = {getattr(elastic, f'{other}_per_worker')} fits on no node of the "
                f"cluster, whose largest has {largest['CPU']:g} CPUs and {largest['GPU']:g} GPUs",
                "ask for less per worker or add larger nodes",
            )
        )
    kinds = _kinds(nodes) if elastic.gpus_per_worker else []
    if len(kinds) < 2:
        return []
    return [f"the cluster has {', '.join(kinds)} devices: a step takes as long as the slowest of those that train"]


# Connect to the Ray cluster that the user names; a wrong address, token or version is reported in one sentence.

AUTH_MODE, TOKEN, TOKEN_FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_ANSWER_S = 10.0
"""How long the cluster that the user names may take to accept a connection [s]: its head may be starting."""
_RETRY_S = 0.2
_OF_HEAD = "set RAY_ADDRESS to HOST:PORT of a head that runs (`ray start --head` prints it); is there a firewall?"
_VERSIONS = re.compile(r"Ray: (\S+)\s+Python: (\S+)")
"""Finds the versions of Ray and Python in Ray's error about a mismatch. The first match is the cluster's, the second this
process's."""


def connect(address: str, **how: object) -> str:
    """Connect to the cluster at ``address``, as ``ray.init`` does with ``how``, and return its dashboard's URL. Raises
    ConnectionError if nothing answers, ConfigError if the cluster has other versions of Ray and Python than this process, or
    refuses this process's token."""
    if is_host_and_port(address):  # Ray itself retries a wrong address or token for minutes, and hides the reason
        wait_for_port(address)
        check_token(address)
    try:
        return ray.init(address=address, **how).dashboard_url or ""
    except RuntimeError as error:
        versions = _VERSIONS.findall(str(error))
        if len(versions) != 2:
            raise
        (ray_there, python_there), (ray_here, python_here) = versions
        limit = (
            f"runs Ray {ray_there} on Python {python_there}; this process has Ray {ray_here} on Python {python_here}"
        )
        remedy = "use an environment with the cluster's versions, or let the run start there: docs/how-to/jobs.md"
        raise ConfigError(explain("RAY_ADDRESS", address, limit, remedy)) from None


def is_host_and_port(address: str) -> bool:
    """Return whether an address of a cluster is HOST:PORT, and not ``auto`` or a URL.

    >>> is_host_and_port("10.0.0.5:6379"), is_host_and_port("ray://10.0.0.5:10001"), is_host_and_port("auto")
    (True, False, False)
    """
    host, _, port = address.rpartition(":")
    return bool(host) and "/" not in host and port.isdecimal()


def check_token(address: str) -> None:
    """Raise ConfigError if the cluster at ``address`` refuses this process's token, ConnectionError if no Ray cluster answers
    there."""
    try:
        GcsClient(address=address).get_all_node_info(timeout=_ANSWER_S)
    except AuthenticationError as error:
        told = f"{_token_source()} is not the cluster's token ({str(error).splitlines()[0]})"
        remedy = "copy ~/.ray/auth_token of the cluster's head to this machine, and set RAY_AUTH_MODE=token"
        raise ConfigError(explain("RAY_ADDRESS", address, told, remedy)) from None
    except RayError as error:
        problem = f"what answers there is no Ray cluster of this version ({str(error).splitlines()[0]})"
        raise ConnectionError(explain("RAY_ADDRESS", address, problem, _OF_HEAD)) from None


def wait_for_port(address: str, patience_s: float = _ANSWER_S) -> None:
    """Raise ConnectionError if nothing listens at ``address`` within ``patience_s``. Retries until then, because the head may
    be starting."""
    host, _, port = address.rpartition(":")
    until_s = time.monotonic() + patience_s
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=patience_s).close()
            return
        except OSError as error:
            if time.monotonic() > until_s or isinstance(error, socket.gaierror):
                problem = f"no Ray cluster answers there ({error})"
                raise ConnectionError(explain("RAY_ADDRESS", address, problem, _OF_HEAD)) from None
        time.sleep(_RETRY_S)


def _token_source() -> str:
    """Return a phrase for an error message that says where this process's token comes from. The token itself is never
    returned."""
    if os.environ.get(AUTH_MODE, "").lower() != "token":
        return f"{AUTH_MODE} here is not token: what was sent"
    if os.environ.get(TOKEN):
        return f"what {TOKEN} has"
    return f"what is in {os.environ.get(TOKEN_FILE) or os.path.expanduser('~/.ray/auth_token')}"


# Measure the memory of the cluster's GPUs: for each kind of GPU, a task reads it on one device.

_WAIT_S = 30.0
"""How long the tasks that measure memory may take [s]. A task that takes longer waits for a GPU that is in use; the data sheet
is used instead."""
ACCELERATOR = "accelerator_type:"
"""Prefix of the resource by which Ray marks nodes that have a certain kind of GPU, as in ``accelerator_type:A100``."""
_A_LITTLE = 0.001
"""Amount of an ``accelerator_type`` resource that a measuring task requests, so that it runs on a node with that kind of GPU. A
node has 1 of it."""
_TASK = "measure-memory"


class DeviceSize(NamedTuple):
    """Memory of a device."""

    total_bytes: int = 0
    """Total memory, from the CUDA driver or a data sheet; 0 if unknown [bytes]."""
    used_bytes: int = 0
    """Memory in use before a process's first tensor: its CUDA context, and what other processes hold [bytes]."""


def device_sizes(kinds: Sequence[str], gpus: float) -> list[DeviceSize]:
    """Measure the memory of one GPU of each kind. A kind is left out if no GPU of it is free.

    Args:
        kinds: Ray's names of the kinds of GPU.
        gpus: GPUs of one worker.
    """
    tasks = [
        ray.remote(_size)
        .options(name=_TASK, num_cpus=0, num_gpus=gpus, resources={f"{ACCELERATOR}{kind}": _A_LITTLE}, max_retries=0)
        .remote()
        for kind in kinds
    ]
    if not tasks:
        return []
    done, late = ray.wait(tasks, num_returns=len(tasks), timeout=_WAIT_S)
    for task in late:
        ray.cancel(task, force=True)
    said = (_answer(task) for task in done)
    return [one for one in said if one.total_bytes]


def _answer(task: object) -> DeviceSize:
    try:
        found: DeviceSize = ray.get(task)
    except Exception:  # the task's node left, or has no torch: the run itself will report it
        return DeviceSize()
    return found


def _size() -> DeviceSize:
    import torch

    if not torch.cuda.is_available():
        return DeviceSize()
    one = torch.ones(1, 16, device="cuda", dtype=torch.bfloat16)
    one @ one.T  # load cuBLAS, whose workspace also counts as memory in use
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return DeviceSize(total, total - free - torch.cuda.memory_reserved())


# Start Ray's dashboard only when a run has trained for a while: the start takes some core-seconds, which would delay the first
# step and the end of a short run.

_AFTER_S = 20.0
"""How long a run trains before the dashboard starts [s]."""


class LateDashboard:
    """An event listener that starts the dashboard of the private cluster that this process has started. Use it as a context
    manager: on exit it waits for a dashboard that is being started; afterwards it starts none."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """``say`` prints a line."""
        self._say, self._thread = say, threading.Thread(target=self._start, name="springtide-dashboard")
        self._begun_s = 0.0
        """When the first step was done, by ``time.monotonic``; 0 until then [s]."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def __call__(self, event: Event) -> None:
        """Start the dashboard in a thread at the first step event that comes ``_AFTER_S`` or more after the run's first
        step."""
        if not isinstance(event, StepDone) or self._thread.ident is not None:
            return
        self._begun_s = self._begun_s or time.monotonic()
        if time.monotonic() - self._begun_s >= _AFTER_S:
            self._thread.start()

    def _start(self) -> None:
        if url := start_dashboard():
            self._say(f"Ray dashboard: http://{url}{dashboard_hint()}")
