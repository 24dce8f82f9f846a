"""Checks of this machine before training. Each check returns a measured value, a limit and a remedy. A check that hangs does
not stop the checks after it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from springtide.api import doctor_checks as checks
from springtide.api.doctor_checks import Check, Status
from springtide.errors import ConfigError, explain, redacted
from springtide.storage import Folder
from springtide.storage.host_limits import lacks_locked_memory, lacks_shared_memory, locked_memory, rdma_devices

if TYPE_CHECKING:  # import Ray's code only for type checks: loading Ray takes time
    from springtide.ray.cluster.upload import Upload

_USUAL_S = 20.0
"""Timeout of most checks [s]; they take milliseconds. Checks that measure a speed have longer timeouts."""
_T = TypeVar("_T")
_LARGE_BYTES = 64 * 2**20
_LEAST_BYTES_PER_S = 20 * 2**20
"""Warn if a store writes fewer bytes per second. At this speed a checkpoint of 1B parameters (12 GB with the optimizer) takes
ten minutes."""
_CLOCKS_APART_S = 2.0
_LONGEST_S = 1.0
"""Warn if one small request to a store takes longer than this [s]. The commit of a checkpoint makes a few such requests in a
row."""
_USUAL_BYTES = 10 * 2**20
"""Warn if the folder to upload as a Ray job's working directory is larger than this: it probably contains data by mistake."""
_MIB = 2**20
_NAMED = 12
"""Largest number of file names in one line of output."""


class CheckPlan(NamedTuple):
    """A check to run, and its timeout."""

    name: str
    make: Callable[[], Sequence[Check]]
    timeout_s: float = _USUAL_S


def doctor(
    store: str = "",
    root: str = "runs",
    environment: Mapping[str, str] | None = None,
    upload: str = "",
) -> Iterator[Check]:
    """Check this machine. Yields the results of each check as soon as it ends.

    Args:
        store: folder or URL whose speed is measured, such as ``run.root``; empty: none. Its test files are removed afterwards.
        root: local folder of runs, whose disk must have room.
        environment: environment variables to check; None: those of this process.
        upload: folder to be submitted as the working directory of a Ray job; empty: none.

    Raises:
        ConfigError: ``store`` is not a supported URL, or ``upload`` is not a folder.
    """
    variables = dict(os.environ if environment is None else environment)
    plans = [
        CheckPlan("versions", checks.versions),
        CheckPlan("devices", lambda: gpus(variables)),
        CheckPlan("memory", checks.memory),
        CheckPlan("shared memory", checks.shared_memory),
        CheckPlan("open files", checks.open_files),
        CheckPlan("disk", lambda: checks.disks(root)),
        CheckPlan("environment", lambda: [*checks.variables(variables), *checks.proxies(variables)]),
        CheckPlan("Ray", lambda: checks.ray_access(variables)),
        CheckPlan("torch and gloo", lambda: torch_and_gloo(variables), 90.0),
    ]
    if store:
        plans.append(CheckPlan("store", StoreCheck(store).make, 180.0))
    if upload:
        plans.append(CheckPlan("upload", UploadCheck(upload).make))
    for plan in plans:
        yield from carry_out(plan)


def carry_out(plan: CheckPlan) -> list[Check]:
    """Run a check and return its results. A check that raises counts as failed. A check that hangs counts as failed after its
    timeout; its thread is left running."""
    found: list[Check] = []

    def make() -> None:
        try:
            found.extend(plan.make())
        # a broken driver or client may raise any exception: report it as a failed check and continue
        except Exception as error:
            text = redacted(f"{type(error).__name__}: {error}")[:300]
            found.append(Check(plan.name, "fail", f"the check ended with {text}", "", "repair what it names"))

    thread = threading.Thread(target=make, name=f"springtide-doctor-{plan.name}", daemon=True)
    began = time.monotonic()
    thread.start()
    thread.join(plan.timeout_s)
    if thread.is_alive():
        figure = f"no answer in {time.monotonic() - began:.0f} s: cut off"
        return [
            Check(plan.name, "fail", figure, f"{plan.timeout_s:g} s", "something hangs: a driver, a mount, a network")
        ]
    return found


class StoreCheck:
    """Measures the speed and latency of one store, a local folder or an object store."""

    def __init__(self, url: str) -> None:
        """``url``: folder or URL of the store. Raises ConfigError if it is not a supported URL."""
        self._folder = Folder(url) / f"doctor-{secrets.token_hex(8)}"

    def make(self) -> list[Check]:
        """Write, read, list and remove a small object and one of 64 MiB, and try a conditional put."""
        where, path = redacted(self._folder.url), Path(self._folder.path)
        made = [one for one in path.parents if not one.exists()] if self._folder.is_local else []
        try:
            found = [*self._small(), *self._large(), self._conditional(), *self._clock()]
        except OSError as error:
            remedy = "credentials, the URL, quota, the network, this machine's clock"
            found = [
                Check("store", "fail", redacted(f"{where}: {error}")[:400], "a folder that can be written", remedy)
            ]
        try:
            self._folder.remove()
            left = self._folder.names()
        except OSError as error:
            # If the write test has failed, do not report this second error: there may be no folder to remove or list
            left = [str(error)[:100]] if found[0].status != "fail" else []
        for one in made:  # remove the folders that this check has created, if they are empty
            with contextlib.suppress(OSError):
                one.rmdir()
        if left:
            found.append(
                Check("store, delete", "warn", f"{where} could not be removed", "", "remove it; allow deletes")
            )
        return found

    def _small(self) -> list[Check]:
        times = {
            "write": _timed(lambda: self._folder.write("small", b"x" * 100)),
            "read": _timed(lambda: self._folder.read("small")),
            "list": _timed(self._folder.names),
            "delete": _timed(lambda: self._folder.remove("small")),
        }
        found = []
        for name, (took_s, answer) in times.items():
            is_right = {"read": answer == b"x" * 100, "list": answer == ["small"]}.get(name, True)
            slow = took_s > _LONGEST_S
            remedy = "a nearer store" if slow else "" if is_right else "its answer is wrong: do not use this store"
            status: Status = "fail" if not is_right else "warn" if slow else "ok"
            found.append(Check(f"store, {name}", status, f"{took_s * 1000:.0f} ms", f"{_LONGEST_S:g} s", remedy))
        return found

    def _large(self) -> list[Check]:
        data = secrets.token_bytes(2**20) * (_LARGE_BYTES // 2**20)
        write_s, _ = _timed(lambda: self._folder.write("large", data))
        read_s, answer = _timed(lambda: self._folder.read("large"))
        self._folder.remove("large")
        if answer != data:
            return [Check("store, 64 MiB", "fail", "reads other bytes than were written", "", "do not use this store")]
        found = []
        for name, took_s in (("write", write_s), ("read", read_s)):
            speed = _LARGE_BYTES / max(took_s, 1e-9)
            slow = speed < _LEAST_BYTES_PER_S
            limit, remedy = f"{_LEAST_BYTES_PER_S / 2**20:g} MiB/s", "a nearer store, a faster network" if slow else ""
            figure = f"{speed / 2**20:.0f} MiB/s"
            found.append(Check(f"store, {name} 64 MiB", "warn" if slow else "ok", figure, limit, remedy))
        return found

    def _clock(self) -> list[Check]:
        before_s = time.time()
        self._folder.write("clock", b"1")
        return clock_check(self._folder.written_s("clock"), before_s, time.time())

    def _conditional(self) -> Check:
        name = "store, conditional put"
        self._folder.create("once", b"1")
        try:
            self._folder.create("once", b"2")
        except FileExistsError:
            return Check(name, "ok", "a file that exists is not created again")
        remedy = "never start two drivers of one run; the slower is refused only at its first commit"
        return Check(name, "warn", "a file that exists is created again", "If-None-Match, which leases use", remedy)


def clock_check(told_s: float, before_s: float, after_s: float) -> list[Check]:
    """Compare the store's clock with this machine's clock. Returns a list with one check, empty if the store reports no time.

    Args:
        told_s: time of the write as reported by the store, perhaps rounded down to a whole second.
        before_s: time before the write, by this machine's clock.
        after_s: time after the write, by this machine's clock.

    Examples:
        >>> from springtide.api.doctor import clock_check
        >>> clock_check(1000.0, 1000.2, 1000.9)[0].figure
        'differs by less than 2 s'
        >>> [one] = clock_check(1090.0, 1000.2, 1000.9)
        >>> one.status, one.figure
        ('warn', 'is 89 s ahead of this machine')
    """
    if not math.isfinite(told_s):
        return []
    ahead, behind = told_s - after_s, before_s - (told_s + 1.0)
    apart = max(ahead, behind)
    if apart <= _CLOCKS_APART_S:
        return [
            Check(
                "store, clock", "ok", f"differs by less than {math.ceil(max(apart, 0.0) + after_s - before_s + 1.0)} s"
            )
        ]
    figure = f"is {apart:.0f} s {'ahead of' if ahead > 0 else 'behind'} this machine"
    remedy = "chrony or ntpd on this machine; times in the journal are its own, and S3 refuses requests 15 min off"
    return [Check("store, clock", "warn", figure, f"{_CLOCKS_APART_S:g} s", remedy)]


def _timed(call: Callable[[], _T]) -> tuple[float, _T]:
    began = time.perf_counter()
    answer = call()
    return time.perf_counter() - began, answer


def _not_sent(found: Upload) -> Iterator[Check]:
    """Yield up to two checks of an upload: a list of files that Ray would leave out, and a warning about links that lead out of
    the folder."""
    if found.left_out:
        counts = {
            name: f" ({count:,} file{'s' * (count != 1)})" * name.endswith("/")
            for name, count in found.left_out.items()
        }
        names = _some([f"{name}{count}" for name, count in counts.items()])
        yield Check("upload, left out", "ok", f"by .gitignore, .rayignore or Ray's own list: {names}")
    if found.links:
        names = _some([f"{name} -> {target}" for name, target in found.links.items()])
        remedy = "what they lead to is sent, whatever its size; put a copy in their place, or name them in .rayignore"
        yield Check("upload, links", "warn", f"out of the folder: {names}", "none", remedy)


def _some(names: list[str]) -> str:
    more = [f"and {len(names) - _NAMED} more"] * (len(names) > _NAMED)
    return ", ".join(names[:_NAMED] + more)


class UploadCheck:
    """Checks a folder that ``ray job submit --working-dir`` would upload."""

    def __init__(self, folder: str) -> None:
        """Raise ConfigError if ``folder`` is not a folder."""
        if not Path(folder).is_dir():
            raise ConfigError(explain("--upload", folder, "is not a folder", "pass the folder of --working-dir"))
        self._folder = folder

    def make(self) -> list[Check]:
        """Measure the files that would be uploaded, and warn of changes that are not committed to git."""
        from springtide.ray.cluster.upload import upload_of  # Ray loads only when needed

        found = upload_of(self._folder)
        size = found.num_bytes
        status: Status = "fail" if size >= found.refused_bytes else "warn" if size > _USUAL_BYTES else "ok"
        largest = ", ".join(f"{name} {one / _MIB:.2f}" for name, one in found.largest())
        figure = f"{len(found.sizes)} files, {size / _MIB:.2f} MiB; largest: {largest or 'nothing'}"
        limit = f"usually under {_USUAL_BYTES / _MIB:g} MiB; Ray refuses {found.refused_bytes / _MIB:g} MiB"
        remedy = "name what a job does not need in .rayignore" if status != "ok" else ""
        return [Check("upload", status, figure, limit, remedy), *_not_sent(found), self._commit()]

    def _commit(self) -> Check:
        from springtide.api.provenance import checkout

        found = checkout(self._folder)
        if not found.commit:
            return Check("upload, commit", "ok", "the folder is in no git checkout")
        commit = found.commit[:12]
        if not found.is_changed:
            return Check("upload, commit", "ok", f"{commit}, unchanged")
        remedy = "commit first: the job has no .git, so nothing can say later what it ran"
        return Check("upload, commit", "warn", f"{commit}, with changes that are not committed", "no changes", remedy)


# The GPU checks of ``springtide doctor``: driver, devices, torch's build, and what NCCL requires of this machine. Also a check
# that two processes can exchange data over gloo.

_FIELDS = (
    "name,driver_version,memory.total,memory.used,ecc.errors.uncorrected.volatile.total,"
    "clocks_throttle_reasons.active,mig.mode.current"
)
_THROTTLED = {0x8: "hardware slowdown", 0x20: "thermal (software)", 0x40: "thermal (hardware)", 0x80: "power brake"}
"""Bit of NVML's clock event reasons -> the problem that lowers a GPU's clock. The bit of the power cap is left out, because
GPUs under load often reach their power cap."""
_LEAST_DRIVER = {13: 580, 12: 525, 11: 450}
"""Major version of CUDA -> major version of the oldest driver that runs it. Source: NVIDIA, CUDA Compatibility, minor
versions."""
_LOST = ("is lost", "fallen off the bus", "Unable to determine the device handle")
"""Parts of nvidia-smi's messages about a GPU that no longer responds."""
_LOST_REMEDY = "look for Xid 79 in the kernel's log (dmesg), and reboot the host; if it comes back, replace the GPU"
_NVIDIA, _DISPLAYS = "0x10de", ("0x0300", "0x0302")
"""PCI vendor id of NVIDIA, and the PCI classes of GPUs: VGA and 3D controllers."""
_GLOO_BYTES_PER_S = 100 * 2**20
"""Warn if gloo's all-reduce is slower than this: the gradient of 100M parameters (fp32) would take more than four seconds per
step."""


def gpus(environment: Mapping[str, str], sys: str = "/sys", dev: str = "/dev") -> list[Check]:
    """Check the NVIDIA GPUs of this machine with nvidia-smi: whether all respond and are of one kind, how much memory is in
    use, ECC errors, throttling and MIG mode. Also check what NCCL requires of this machine.

    Args:
        environment: environment variables, name -> value.
        sys: path of sysfs.
        dev: path of the device files that this machine or container has.
    """
    on_bus, program = devices_on_bus(sys), shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None and on_bus:
        remedy = "install NVIDIA's driver, or start the container with --gpus all; without them it trains on CPUs"
        return [Check("devices", "warn", f"{on_bus} NVIDIA devices on the bus, and no driver here", "a driver", remedy)]
    if program is None:
        return [Check("devices", "ok", f"no NVIDIA driver; {os.cpu_count() or 1} CPUs")]
    done = _ask(program, f"--query-gpu={_FIELDS}")
    lines = [line for line in done.stdout.strip().splitlines() if line.count(",") >= 6]
    if done.returncode and not lines:
        said = (done.stderr or done.stdout).strip()[:200]
        is_lost = any(text in said for text in _LOST)
        remedy = _LOST_REMEDY if is_lost else "repair the driver: its module and its library must be of one version"
        return [Check("devices", "fail", f"nvidia-smi ended with status {done.returncode}: {said}", "", remedy)]
    found = [gpu(number, line) for number, line in enumerate(lines)]
    return [*found, *together(lines, given(dev)), *network_of_gpus(sys)]


def _ask(program: str, query: str) -> subprocess.CompletedProcess[str]:
    command = [program, query, "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=15)


def devices_on_bus(sys: str = "/sys") -> int:
    """Return the number of NVIDIA GPUs on the PCI bus, with or without a driver.

    Args:
        sys: path of sysfs.
    """
    found = 0
    for device in Path(sys, "bus/pci/devices").glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        found += vendor == _NVIDIA and kind.startswith(_DISPLAYS)
    return found


def gpu(number: int, line: str) -> Check:
    """Return the check of one GPU.

    Args:
        number: index of the GPU.
        line: its line from nvidia-smi, separated by commas: name, driver, memory and memory in use [MiB], ECC errors, throttle
            reasons (hexadecimal), MIG mode.
    """
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != 7:
        return Check(f"GPU {number}", "fail", f"nvidia-smi said {line[:100]!r}", "", "repair the driver")
    name, driver, total, used, errors, reasons, sliced = cells
    figure = f"{name}, driver {driver}, {used} of {total} MiB in use, ECC errors {errors}"
    why = [text for bit, text in _THROTTLED.items() if reasons.startswith("0x") and int(reasons, 16) & bit]
    if errors.isdigit() and int(errors):
        return Check(f"GPU {number}", "fail", figure, "no uncorrected errors", "reset or replace the device")
    if sliced == "Enabled":
        remedy = "one worker a slice, which reaches others through the host's memory; or nvidia-smi -mig 0"
        return Check(f"GPU {number}", "warn", f"{figure}, cut into slices (MIG)", "whole GPUs", remedy)
    if why:
        remedy = "look at cooling and power; a slow rank holds up all others"
        return Check(f"GPU {number}", "warn", f"{figure}, slowed down: {', '.join(why)}", "full clocks", remedy)
    if used.isdigit() and total.isdigit() and int(used) > 0.1 * int(total):
        remedy = "end the other programs on this device; nvidia-smi shows who"
        return Check(f"GPU {number}", "warn", figure, "under 10% in use", remedy)
    return Check(f"GPU {number}", "ok", figure)


def given(dev: str = "/dev") -> int:
    """Return the number of GPUs that this machine or container was given: those with a device file.

    Args:
        dev: path of the device files.
    """
    return sum(path.name.removeprefix("nvidia").isdigit() for path in Path(dev).glob("nvidia*"))


def together(lines: Sequence[str], expected: int) -> list[Check]:
    """Compare all GPUs of this machine. Returns one check per problem: GPUs are missing, or are of different kinds.

    Args:
        lines: output of nvidia-smi, one line per GPU.
        expected: number of GPUs that this machine, or container, was given; 0 if it is not known.
    """
    found, names = [], Counter(line.split(",")[0].strip() for line in lines)
    if len(lines) < expected:
        figure = f"{len(lines)} of {expected} answer: the others fell off the bus, or failed"
        found.append(Check("GPUs", "fail", figure, f"{expected}", _LOST_REMEDY))
    if len(names) > 1:
        figure = " and ".join(f"{number} x {name}" for name, number in sorted(names.items()))
        remedy = "CUDA_VISIBLE_DEVICES with the GPUs of one kind: a step takes as long as the slowest"
        found.append(Check("GPUs", "warn", figure, "one kind", remedy))
    return found


def network_of_gpus(sys: str = "/sys", shm: str = "/dev/shm") -> list[Check]:
    """Check what NCCL requires of this machine: locked memory for RDMA devices (InfiniBand, EFA), and shared memory.

    Args:
        sys: path of sysfs.
        shm: path of the shared-memory file system.
    """
    devices, most = rdma_devices(sys), locked_memory()
    may = "without limit" if most == float("inf") else f"{most / 2**20:g} MiB"
    lacks, figure = lacks_locked_memory(sys), f"{may} (InfiniBand or EFA: {', '.join(devices) or 'none'})"
    found = [Check("locked memory", "fail" if lacks else "ok", figure, "without limit" * bool(lacks), _after(lacks))]
    if lacks := lacks_shared_memory(shm):
        found.append(Check("shared memory of NCCL", "fail", lacks.partition(":")[0], "", _after(lacks)))
    return found


def _after(text: str) -> str:
    """Return the remedy in an error text: the part after the first colon."""
    return text.partition(": ")[2]


def driver_of(environment: Mapping[str, str]) -> str:
    """Return the version of this machine's NVIDIA driver; empty if there is none, or it does not respond.

    Args:
        environment: environment variables, name -> value.
    """
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        return ""
    done = _ask(program, "--query-gpu=driver_version")
    return "" if done.returncode else done.stdout.strip().partition("\n")[0].strip()


def torch_and_gloo(environment: Mapping[str, str], timeout_s: float = 80.0) -> list[Check]:
    """Measure an all-reduce between two processes of this machine, and compare torch's devices with the driver's.

    Args:
        environment: environment variables of both processes.
        timeout_s: time after which both processes are killed [s].
    """
    with tempfile.TemporaryDirectory() as folder:
        # pass on sys.path, as checkpoint/writer_process.py does; -P keeps the working directory from the front of sys.path,
        # where it could hide packages
        command = [sys.executable, "-P", "-m", "springtide.distributed.gloo_speed", f"{folder}/meet"]
        path = {"PYTHONPATH": os.pathsep.join(sys.path)}
        local = {"OMP_NUM_THREADS": "1", **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": {**environment, **local, **path}}
        ranks = [subprocess.Popen([*command, str(rank)], **options) for rank in (0, 1)]  # type: ignore[call-overload]
        try:
            said, errors = ranks[0].communicate(timeout=timeout_s)
        finally:
            for one in ranks:
                one.kill()
                one.communicate()
    if ranks[0].returncode:
        last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        return [
            Check("gloo", "fail", f"two local processes cannot talk: {last[0][:200]}", "", "look at firewall and torch")
        ]
    facts = json.loads(said)
    speed = facts["bytes_per_s"]
    slow = speed < _GLOO_BYTES_PER_S
    limit, remedy = f"{_GLOO_BYTES_PER_S / 2**20:g} MiB/s", "free CPU cores; on GPUs NCCL is used" if slow else ""
    found = [
        Check(
            "gloo", "warn" if slow else "ok", f"{speed / 2**20:.0f} MiB/s summed by two local processes", limit, remedy
        )
    ]
    return [*found, torch_check(facts, driver_of(environment))]


def torch_check(facts: Mapping[str, Any], driver: str) -> Check:
    """Return the check of torch's build: whether it finds the driver's GPUs and contains code for them.

    Args:
        facts: output of ``springtide.distributed.gloo_speed``.
        driver: version of the NVIDIA driver; empty if there is no driver.
    """
    cuda, seen = str(facts["cuda"]), int(facts["num_gpus"])
    build = f"CUDA {cuda}, NCCL {facts['nccl'] or 'none'}" if cuda else "without CUDA"
    figure = f"built {build}, sees {seen} GPUs"
    major, branch = (text.partition(".")[0] for text in (cuda, driver))
    needed = _LEAST_DRIVER.get(int(major), 0) if major.isdigit() else 0
    if driver and not cuda:
        remedy = f"pip install torch --index-url https://download.pytorch.org/whl/{wheels(driver)}"
        return Check("torch", "fail", f"{figure}, and the driver is {driver}", "a build with CUDA", remedy)
    # fail only if torch sees no GPU: with NVIDIA's compatibility package, an older driver works, too
    if not seen and branch.isdigit() and int(branch) < needed:
        remedy = f"a newer driver, or torch from https://download.pytorch.org/whl/{wheels(driver)}"
        return Check(
            "torch", "fail", f"{figure}; driver {driver}", f"driver {needed} or newer for CUDA {major}", remedy
        )
    if driver and not seen:
        remedy = "look at CUDA_VISIBLE_DEVICES and the rights on /dev/nvidia*, or install a torch built for this driver"
        return Check("torch", "fail", figure, "the driver's devices", remedy)
    if old := [str(one) for one in facts.get("capabilities", ()) if not has_code(str(one), facts.get("archs", ()))]:
        have = ", ".join(facts["archs"])
        remedy = "another build of torch (https://download.pytorch.org/whl), which has code for this GPU"
        return Check(
            "torch", "fail", f"{figure}, with code for {have}", f"code for sm_{old[0].replace('.', '')}", remedy
        )
    return Check("torch", "ok", figure)


def wheels(driver: str) -> str:
    """Return the name of the package index with torch builds that a driver can run: ``cu`` and a CUDA version.

    Args:
        driver: version of the driver.

    Examples:
        >>> wheels("580.95.05"), wheels("550.54")
        ('cu130', 'cu126')
    """
    branch = driver.partition(".")[0]
    return "cu130" if branch.isdigit() and int(branch) >= _LEAST_DRIVER[13] else "cu126"


def has_code(capability: str, archs: Sequence[str]) -> bool:
    """Return True if a build of torch runs on a GPU. It must contain binary code (``sm_``) for the same major version and the
    same or an earlier minor version, or code that the driver translates (``compute_``).

    Args:
        capability: compute capability of the GPU, such as ``9.0``.
        archs: architectures of the build, from ``torch.cuda.get_arch_list``. If empty, the result is True.

    Examples:
        >>> has_code("9.0", ["sm_80", "sm_90"]), has_code("8.9", ["sm_80"]), has_code("7.0", ["sm_75", "sm_80"])
        (True, True, False)
        >>> has_code("12.0", ["sm_90", "compute_90"])
        True
    """
    major, minor = map(int, capability.split("."))
    for arch in archs:
        kind, _, digits = arch.partition("_")
        digits = digits.rstrip("abcdefghijklmnopqrstuvwxyz")
        there = int(digits[:-1]), int(digits[-1])
        if there <= (major, minor) and (kind == "compute" or there[0] == major):
            return True
    return not archs
