"""The result of a check of ``springtide doctor``, and the checks of this machine, one function per check."""

from __future__ import annotations

import os
import resource
import shutil
import stat
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

from packaging.requirements import Requirement

from springtide.storage.host_limits import free_bytes

Status = Literal["ok", "warn", "fail"]
_GIB = 2**30
_NAMED = ("torch", "ray", "mlflow", "pyarrow", "obstore", "pydantic")
"""Packages whose installed versions are printed. The versions of all required packages are checked."""
_EXTRAS = ("", "ray")
_LEAST_SHM = 512 * 2**20
"""Shared memory that Ray's object store takes on a private cluster (started for a single run) [bytes]."""
_RAY_SHARE = 0.3
"""Fraction of a node's memory that Ray's object store takes by default, if /dev/shm has room for it."""
_LEAST_FILES, _USUAL_FILES = 1024, 65_536
"""Limits for the number of files that a process may open. The check fails below the first limit and warns below the second. Ray
also warns below the second when it starts."""
_LEAST_DISK, _USUAL_DISK = _GIB, 10 * _GIB
_FULL = 0.95
"""Used fraction of a disk above which Ray refuses to spill objects to it."""
_LEAST_MEMORY = 2 * _GIB
"""Memory that a driver, Ray's processes and one worker take together [bytes]."""
_BITE = {
    "CUDA_LAUNCH_BLOCKING": ("1", "unset it: each kernel waits for the one before"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", "unset it: each tensor is allocated by the driver"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "unset it: each collective is checked by another one"),
    "NCCL_DEBUG": ("TRACE", "set it to WARN: each call is logged"),
    "CUDA_VISIBLE_DEVICES": ("", "unset it: it is empty, so no GPU is seen"),
}
"""Environment variables that slow training down or break it: name -> (harmful value, remedy)."""
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_LOOPBACK = ("localhost", "127.0.0.1")


class Check(NamedTuple):
    """The result of one check."""

    name: str
    status: Status
    figure: str
    """The measured value with its unit, or the fact that was found."""
    limit: str = ""
    """The required value; empty if there is no requirement."""
    remedy: str = ""
    """What to do; empty if all is well."""

    def describe(self) -> str:
        """Return the check as lines for people."""
        limit = f" (needed: {self.limit})" if self.limit else ""
        remedy = f"\n{'':6}try: {self.remedy}" if self.remedy else ""
        return f"{self.status:4}  {self.name}: {self.figure}{limit}{remedy}"


def versions() -> list[Check]:
    """Check the installed versions against the requirements of springtide."""
    known = {name: _version(name) for name in _NAMED}
    shown = ", ".join(f"{name} {version or 'not installed'}" for name, version in known.items())
    python = ".".join(map(str, sys.version_info[:3]))
    own = f"springtide {_version('springtide') or 'not installed'}, Python {python}, {shown}"
    wrong = []
    for text in metadata.requires("springtide") or []:
        one = Requirement(text)
        if one.marker and not any(one.marker.evaluate({"extra": extra}) for extra in _EXTRAS):
            continue
        version = _version(one.name)
        is_optional = one.marker is not None and "extra" in str(one.marker)
        if version and not one.specifier.contains(version, prereleases=True):
            wrong.append(f"{one.name} {version}, needed {one.specifier}")
        elif not version and not is_optional:
            wrong.append(f"{one.name} is missing, needed {one.specifier}")
    found = [
        Check("versions", "fail" if wrong else "ok", own, "; ".join(wrong), "pip install -U springtide" * bool(wrong))
    ]
    if not known["ray"]:
        remedy = "pip install 'springtide[ray]'"
        found.append(Check("Ray", "warn", "not installed: runs train under torchrun only", "", remedy))
    return found


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def memory(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> list[Check]:
    """Check the free memory of this machine or container, and whether it swaps."""
    if not Path(proc, "meminfo").exists():
        return [Check("memory", "ok", "not known on this system")]
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in _lines(proc, "meminfo"))}
    limit = "".join(_lines(cgroup, "memory.max")).strip()
    shown = f", container limit {int(limit) / _GIB:.1f} GiB" if limit.isdigit() else ", no container limit"
    free = free_bytes(proc, cgroup)
    figure = f"{free / _GIB:.1f} GiB free of {kib['MemTotal'] / 2**20:.1f} GiB{shown}"
    poor = free < _LEAST_MEMORY
    remedy = "end other programs, or give the container more" if poor else ""
    found = [Check("memory", "warn" if poor else "ok", figure, f"{_LEAST_MEMORY / _GIB:g} GiB free", remedy)]
    swapped = (kib.get("SwapTotal", 0) - kib.get("SwapFree", 0)) * 1024
    if swapped > _GIB:
        remedy = "swapoff -a where you train: a swapped worker is a slow rank"
        found.append(Check("swap", "warn", f"{swapped / _GIB:.1f} GiB in use", "none", remedy))
    return found


def _lines(folder: str, name: str) -> list[str]:
    try:
        return Path(folder, name).read_text().splitlines()
    except OSError:  # no cgroup file: this process runs in no container
        return []


def shared_memory(path: str = "/dev/shm", proc: str = "/proc") -> list[Check]:
    """Check that /dev/shm has room for Ray's object store and for the copies of the training state that are written as
    checkpoints."""
    if not os.path.isdir(path):
        return [Check("shared memory", "warn", f"no {path}", "", "checkpoint.stage names another memory file system")]
    usage = shutil.disk_usage(path)
    kib = next((int(line.split()[1]) for line in _lines(proc, "meminfo") if line.startswith("MemTotal")), 0)
    wanted = max(_LEAST_SHM, round(_RAY_SHARE * kib * 1024))
    status: Status = "fail" if usage.free < _LEAST_SHM else "warn" if usage.total < wanted else "ok"
    limit = f"{wanted / _GIB:.1f} GiB for Ray's object store, and what a checkpoint's state takes on this node"
    remedy = f"docker run --shm-size={wanted // _GIB + 1}g, or remove old files in {path}" if status != "ok" else ""
    return [
        Check(
            "shared memory",
            status,
            f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free in {path}",
            limit,
            remedy,
        )
    ]


def open_files() -> list[Check]:
    """Check how many files a process may open; each network connection counts as one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = float("inf") if soft == resource.RLIM_INFINITY else soft
    status: Status = "fail" if most < _LEAST_FILES else "warn" if most < _USUAL_FILES else "ok"
    remedy = f"ulimit -n {_USUAL_FILES}" if status != "ok" else ""
    return [Check("open files", status, f"{soft} (most allowed: {hard})", f"{_USUAL_FILES}", remedy)]


def disks(root: str) -> list[Check]:
    """Check the free disk space for runs, if their folder is local, and in the temporary folder, where Ray keeps its files.

    Args:
        root: folder or URL of the runs (``run.root``).
    """
    found = []
    for name, path in (("disk of runs", root), ("disk of Ray", tempfile.gettempdir())):
        if "://" in path:
            continue
        there = next(one for one in (Path(path).absolute(), *Path(path).absolute().parents) if one.exists())
        usage = shutil.disk_usage(there)
        is_full = usage.used > _FULL * usage.total
        status: Status = "fail" if usage.free < _LEAST_DISK else "warn" if usage.free < _USUAL_DISK or is_full else "ok"
        figure = f"{usage.free / _GIB:.1f} GiB free, {usage.used / usage.total:.0%} in use, at {there}"
        remedy = "another run.root or TMPDIR, fewer checkpoints (checkpoint.keep_last)" if status != "ok" else ""
        found.append(Check(name, status, figure, f"{_USUAL_DISK / _GIB:g} GiB free, under {_FULL:.0%} in use", remedy))
    return found


def variables(environment: Mapping[str, str]) -> list[Check]:
    """Check for environment variables that slow training down or hide the GPUs.

    Args:
        environment: name -> value.
    """
    found = []
    cores = os.cpu_count() or 1
    threads = environment.get("OMP_NUM_THREADS", "")
    if not threads and cores > 1:
        remedy = "parallel.threads = cores / workers per node, or OMP_NUM_THREADS; under Ray each worker has its CPUs' number"
        found.append(Check("OMP_NUM_THREADS", "warn", f"unset: each process takes all {cores} cores", "", remedy))
    elif threads.isdigit() and int(threads) > cores:
        found.append(Check("OMP_NUM_THREADS", "warn", threads, f"at most {cores} cores", "lower it"))
    for name, (bad, remedy) in _BITE.items():
        if environment.get(name) == bad:
            found.append(Check(name, "warn", f"{bad!r}", "", remedy))
    return found or [Check("environment", "ok", "no variable that slows training is set")]


def proxies(environment: Mapping[str, str]) -> list[Check]:
    """Report the HTTP proxies, and check that servers on this machine are exempt from them (``no_proxy``).

    Args:
        environment: name -> value.
    """
    named = {name: environment.get(name) or environment.get(name.upper()) for name in _PROXIES}
    # cut off everything up to the @: the usual redaction does not find a password in a URL without a scheme
    found = [f"{name} at {value.rpartition('@')[2].rpartition('/')[2]}" for name, value in named.items() if value]
    if not found:
        return []
    passed = (environment.get("no_proxy") or environment.get("NO_PROXY") or "").replace(" ", "").split(",")
    lacks = [] if "*" in passed else [one for one in _LOOPBACK if one not in passed]
    remedy = (
        f"add {','.join(lacks)} to no_proxy: MLflow or a store on this machine is asked for at the proxy"
        if lacks
        else ""
    )
    return [Check("proxy", "warn" if lacks else "ok", ", ".join(found), "no_proxy has this machine", remedy)]


def ray_access(environment: Mapping[str, str]) -> list[Check]:
    """Check that the cluster of ``RAY_ADDRESS`` requires a token, and that this process has one. The token is never shown.

    Args:
        environment: name -> value.
    """
    if not environment.get("RAY_ADDRESS"):
        return [
            Check("Ray", "ok", "RAY_ADDRESS is unset: a private cluster with a token of its own; no nodes to check")
        ]
    mode = environment.get("RAY_AUTH_MODE", "disabled").lower()
    if mode != "token":
        figure, remedy = f"RAY_AUTH_MODE is {mode[:20]}", "RAY_AUTH_MODE=token on all nodes, see docs/how-to/aws.md"
        return [Check("Ray", "warn", figure, "token: whoever reaches the cluster runs code on it", remedy)]
    file = Path(
        environment.get("RAY_AUTH_TOKEN_PATH") or Path(environment.get("HOME", "~")).expanduser() / ".ray/auth_token"
    )
    if environment.get("RAY_AUTH_TOKEN"):
        return [Check("Ray", "ok", "RAY_AUTH_MODE is token, and a token is set")]
    if not file.is_file():
        remedy = "copy the cluster's token there, or name its file in RAY_AUTH_TOKEN_PATH"
        return [Check("Ray", "fail", f"RAY_AUTH_MODE is token, and there is none in {file}", "a token", remedy)]
    if file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        return [Check("Ray", "warn", f"others may read {file}", "mode 600", f"chmod 600 {file}")]
    return [Check("Ray", "ok", f"RAY_AUTH_MODE is token, and there is one in {file}")]
