"""Cache of compiled code in the run's folder, so that a new node does not compile again what another node has compiled.

    <run>/compiled/KIND/8-group.bin    a header, a seal (an HMAC), and torch's cache artifacts

KIND is the digest of everything that the code depends on: versions, kind of device, model. 8 is the number of rows of a
micro-batch, which follows from the number of workers. A group of one worker writes 8-alone.bin.

torch executes the code that it loads, so nobody may forge a file. A digest would reveal damage, but anyone who can write to the
store could write a digest, too. So the file has a seal: an HMAC-SHA256 with a key that only the run's user can derive. The
driver derives the key and passes it to the workers. A file without a valid seal is not loaded, and the node compiles. Without a
key (no ``~/.springtide``) no code is cached.

Only rank 0 of the newest worker group (the one that holds the lease, the right to write the run) writes: after the first step,
and later when it has compiled more. It writes in a thread, so no step waits for the store. A new process loads the files of its
KIND before its preflight (a test step), except files that a process of its node has already loaded.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import hmac
import logging
import platform
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from springtide.checkpoint import leases
from springtide.checkpoint.restore import Restored
from springtide.config import Config
from springtide.config.code import code_fingerprint, seal
from springtide.distributed import World
from springtide.distributed.compiled import compiled_artifacts, compiled_folder, gave_up, load_compiled, num_compiled
from springtide.errors import RunExists
from springtide.events import Event, Warned
from springtide.storage import Folder, to_json
from springtide.storage.digest import of_bytes
from springtide.training.group_lease import GroupLease
from springtide.training.losses import largest_micro_batch
from springtide.training.part import DoneStep, Part

_log = logging.getLogger(__name__)
_HEAD = b"springtide compiled code 1\n"
_SEAL_BYTES = hashlib.sha256().digest_size
_FILE = re.compile(r"\d{1,6}-(alone|group)\.bin")
_MOST_FILES = 16
"""Largest number of files that a node loads. A run has only few sizes of micro-batches."""
_MOST_BYTES = 256 * 2**20
"""Largest size of a file of compiled code [bytes]. Larger files are neither written nor read."""


def key_of(run: Folder, config: Config) -> str:
    """Return the key for the seal (HMAC) of a run's compiled code, 64 hex digits. Empty if the user has no key or the run
    compiles nothing.

    The same user always derives the same key.

    Args:
        run: the run's folder.
        config: the run's config.
    """
    flexes = config.shards.mask_across_documents and config.elastic.gpus_per_worker
    return seal(f"compiled code of {run.url}") if config.parallel.compile or flexes else ""


def padded_rows(config: Config, workers: int) -> int:
    """Return the number of rows to which micro-batches are padded when blocks are compiled.

    Args:
        config: the run's config.
        workers: number of workers in the group.
    """
    order, exact = config.stream, config.parallel.exact
    most_lanes = -(-order.num_lanes // workers)
    return largest_micro_batch(order.global_batch // order.num_lanes, most_lanes, config.train.rows_at_once, exact)


def sealed(name: str, artifacts: bytes, key: str) -> bytes:
    """Return the bytes to write to file ``name``: ``artifacts`` after their seal, an HMAC with ``key``."""
    return _HEAD + _mac(name, artifacts, key) + artifacts


def unsealed(name: str, data: bytes, key: str) -> bytes | None:
    """Return the artifacts in ``data``, the bytes of file ``name``; None if their seal, an HMAC, does not fit ``key``."""
    begin = len(_HEAD) + _SEAL_BYTES
    artifacts = data[begin:]
    if not data.startswith(_HEAD) or not hmac.compare_digest(data[len(_HEAD) : begin], _mac(name, artifacts, key)):
        return None
    return artifacts


def _mac(name: str, artifacts: bytes, key: str) -> bytes:
    found = hmac.new(key.encode(), f"{name}\n".encode(), hashlib.sha256)
    found.update(artifacts)
    return found.digest()


@dataclasses.dataclass(frozen=True)
class CompileCache:
    """Cache of the compiled code of a run."""

    run: Folder
    key: str
    """Key of the files' seals (HMACs), from ``key_of`` in the run's driver; empty turns the cache off."""
    config: Config

    def kind(self, device: torch.device) -> str:
        """Return the folder of the code for devices of the same kind as ``device``, as a path below the run's folder."""
        config, model = self.config, platform.machine()
        if device.type == "cuda":
            model = f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
        about = {
            "springtide": code_fingerprint(),
            "torch": [torch.__version__, torch.version.cuda, torch.version.hip, platform.python_version()],
            "device": model,
            "model": config.model.model_dump(mode="json"),
            "parallel": config.parallel.model_dump(
                include={"precision", "offload", "reduction", "recompute", "compile"}
            ),
            "rows": [config.shards.sequence_length, config.shards.mask_across_documents],
        }
        return f"compiled/{of_bytes(to_json(about).encode())}"

    def name(self, device: torch.device, workers: int) -> str:
        """Return the file that rank 0 of a group of ``workers`` workers writes, as a path below the run's folder."""
        return f"{self.kind(device)}/{padded_rows(self.config, workers)}-{'alone' if workers == 1 else 'group'}.bin"

    def load(self, device: torch.device) -> int:
        """Load the run's compiled code into this node's torch cache, each file once per node. Returns the number of files that
        this process has loaded. A file that cannot be read is skipped with a warning, and its code is compiled again. Raises
        ConfigError if another user owns the node's cache or can write to it."""
        if not self.key:
            return 0
        kind, folder = self.kind(device), Path(compiled_folder())
        try:
            with (folder / "springtide.lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # other processes of this node wait, then skip the loaded files
                names = [f"{kind}/{name}" for name in (self.run / kind).names() if _FILE.fullmatch(name)]
                return sum(self._load(name, folder) for name in sorted(names)[:_MOST_FILES])
        except OSError as error:
            _log.warning("cannot load compiled code from %s (%s); compiling it again", self.run.where(kind), error)
            return 0

    def _load(self, name: str, folder: Path) -> bool:
        mark = folder / f"springtide-{name.replace('/', '-')}"
        if mark.exists():
            return False
        try:
            found = load_compiled(self._read(name))
        except Exception as error:  # any error: torch raises errors of many types here
            _log.warning("cannot load compiled code from %s (%s); compiling it again", self.run.where(name), error)
            return False
        mark.touch()
        return found

    def _read(self, name: str) -> bytes:
        if (size := self.run.size(name)) > _MOST_BYTES:
            raise ValueError(f"it has {size} bytes, above the limit of {_MOST_BYTES}")
        artifacts = unsealed(name, self.run.read(name), self.key)
        if artifacts is None:
            raise ValueError("it is damaged, or another user wrote it: its seal does not fit this run's user")
        return artifacts

    def save(self, name: str, lease: GroupLease, term: int) -> bool:
        """Write the code that this process has compiled to file ``name``. Writes nothing and returns False if there is no code,
        if the code is too large, or if the file already has at least as many bytes. Raises RunExists, before anything is
        written, if the lease with the number ``term`` is no longer the newest."""
        artifacts = compiled_artifacts()
        if not artifacts or len(artifacts) + len(_HEAD) + _SEAL_BYTES > _MOST_BYTES:
            return False
        data = sealed(name, artifacts, self.key)
        if self.run.exists(name) and self.run.size(name) >= len(data):
            return False
        leases.check(self.run, term, lease.owner)
        self.run.write(name, data)
        return True


class CompiledCode(Part):
    """Writes the code that rank 0 of a worker group has compiled to the run's cache of compiled code."""

    def __init__(self, cache: CompileCache | None, world: World, lease: GroupLease) -> None:
        self._cache = cache if cache is not None and cache.key and world.is_first else None
        self._world, self._lease = world, lease
        self._saved, self._thread = 0, threading.Thread()

    def begin(self, found: Restored | None) -> None:
        self._saved = 0  # save again after a rollback: a save in progress may fail, because its lease has ended

    def after_step(self, done: DoneStep) -> Iterator[Event]:
        """Start a save in a thread if code was compiled since the last save and no save is in progress."""
        if self._cache is not None and not self._thread.is_alive() and (compiled := num_compiled()) != self._saved:
            self._saved = compiled
            given = self._cache, self._cache.name(self._world.device, self._world.size), self._lease.term
            self._thread = threading.Thread(target=self._save, args=given, name="springtide-compiled", daemon=True)
            self._thread.start()
        return iter(())

    def wait(self) -> None:
        """Wait until no save of compiled code is in progress."""
        if self._thread.ident is not None:
            self._thread.join()

    def _save(self, cache: CompileCache, name: str, term: int) -> None:
        try:
            cache.save(name, self._lease, term)
        except RunExists:
            pass  # a newer group has claimed the run, and saves the code that it compiles
        except Exception as error:  # training goes on without the cache
            _log.warning("cannot write compiled code to %s: %s", cache.run.where(name), error)


# Warning when blocks fall back from compiled to eager execution.


class Recompiles(Part):
    """Warns if blocks of the model that should run compiled fall back to eager execution."""

    def __init__(self, compiles: bool) -> None:
        """``compiles``: ``parallel.compile``, whether blocks should run compiled."""
        self._watching = compiles

    def after_step(self, done: DoneStep) -> Iterator[Warned]:
        """Warn once if some blocks no longer run compiled."""
        if self._watching and (reason := gave_up()):
            self._watching = False
            yield Warned(step=done.step, reason=reason)
