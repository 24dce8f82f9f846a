"""An object store in memory: conditional puts, latency, outages, lost answers, names in any order. It knows who wrote what."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import fsspec
from fsspec import AbstractFileSystem

from simulation.clock import Clock, Process


class Write(NamedTuple):
    """A put or removal that took effect."""

    time_s: float
    begun_s: float
    process: Process | None
    path: str
    is_removal: bool


class Store:
    """What is stored."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.files: dict[str, bytes] = {}
        self.writes: list[Write] = []
        self.away_until_s = 0.0
        self.lost_answers = 0.0
        """Share of puts that are carried out and answered by an error."""
        self.slow = 1.0
        self.lies: Callable[[str], bool] = lambda host: False
        self.calls = 0
        self._order = random.Random(clock.random.random())

    def call(self) -> None:
        """A request travels; raises OSError if the store is away."""
        self.calls += 1
        clock = self.clock
        if clock.over:
            clock.sleep(0.0)
        if clock.current is None:
            return
        clock.sleep(self.slow * clock.random.uniform(0.005, 0.05))
        if self.away_until_s > clock.now:
            clock.sleep(clock.random.uniform(1.0, 4.0))
            raise OSError("503 Slow Down: the store is away")

    def listed(self, names: Iterable[str]) -> list[str]:
        """In an order that means nothing, as that of a folder on a disk."""
        found = sorted(names)
        self._order.shuffle(found)
        return found

    def read_by(self, path: str, data: bytes) -> bytes:
        """What the process that runs reads: a node with bad memory reads something else."""
        me = self.clock.current
        if me is not None and path.endswith(".safetensors") and self.lies(me.host):
            return bytes([data[0] ^ 1]) + data[1:] if data else data
        return data

    def put(self, path: str, data: bytes, only_new: bool) -> None:
        begun_s = self.clock.now
        self.call()
        if only_new and path in self.files:
            raise FileExistsError(path)
        self.clock.tell("put", path, data=data)
        self.files[path] = data
        self.writes.append(Write(self.clock.now, begun_s, self.clock.current, path, False))
        if self.clock.current is not None and self.clock.random.random() < self.lost_answers:
            raise OSError("connection reset: the answer is lost")

    def remove(self, path: str) -> None:
        begun_s = self.clock.now
        self.call()
        for one in [one for one in self.files if one == path or one.startswith(f"{path}/")]:
            self.clock.tell("remove", one)
            del self.files[one]
            self.writes.append(Write(self.clock.now, begun_s, self.clock.current, one, True))


class SimulatedFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """fsspec's view of the store of the simulation that runs."""

    protocol = "memory"
    cachable = False
    store: ClassVar[Store]

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return "/" + str(path).removeprefix("memory://").strip("/")

    def unstrip_protocol(self, name: str) -> str:
        return f"memory://{self._strip_protocol(name)}"

    def ls(self, path: str, detail: bool = False, **_: Any) -> list[Any]:
        self.store.call()
        prefix = f"{self._strip_protocol(path)}/"
        names = {prefix + one[len(prefix) :].split("/")[0] for one in self.store.files if one.startswith(prefix)}
        if not names:
            raise FileNotFoundError(path)
        return self.store.listed(names)

    def find(self, path: str, **_: Any) -> list[str]:
        self.store.call()
        prefix = f"{self._strip_protocol(path)}/"
        return self.store.listed(one for one in self.store.files if one.startswith(prefix))

    def exists(self, path: str, **_: Any) -> bool:
        self.store.call()
        path = self._strip_protocol(path)
        return path in self.store.files or any(one.startswith(f"{path}/") for one in self.store.files)

    def open(self, path: str, mode: str = "rb", **_: Any) -> io.BytesIO:
        assert mode == "rb"
        return io.BytesIO(self.cat_file(path))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        self.store.call()
        path = self._strip_protocol(path)
        if path not in self.store.files:
            raise FileNotFoundError(path)
        return self.store.read_by(path, self.store.files[path][start:end])

    def size(self, path: str) -> int:
        return len(self.cat_file(path))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        self.store.put(self._strip_protocol(path), bytes(value), mode == "create")

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        self.store.remove(self._strip_protocol(path))


def install(store: Store) -> None:
    """Let ``memory://`` be this store."""
    SimulatedFileSystem.store = store
    fsspec.register_implementation("memory", SimulatedFileSystem, clobber=True)


@contextlib.contextmanager
def installed(store: Store) -> Iterator[None]:
    """Let ``memory://`` be this store for a while: other tests of this process use fsspec's."""
    before = fsspec.get_filesystem_class("memory")
    install(store)
    try:
        yield
    finally:
        fsspec.register_implementation("memory", before, clobber=True)
