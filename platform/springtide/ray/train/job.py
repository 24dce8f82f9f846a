"""The job that the driver sends to each worker's process."""

from __future__ import annotations

import dataclasses

from springtide.config import Config
from springtide.ray.train.mailbox import MailboxClient
from springtide.storage import Folder
from springtide.training.compile_cache import CompileCache


@dataclasses.dataclass(frozen=True)
class TrainJob:
    """What a worker's process needs to train a run."""

    config: Config
    mailbox: MailboxClient
    labels: dict[str, str] = dataclasses.field(default_factory=dict)
    """Key -> value, stored as labels in the run's checkpoints."""
    owner: str = ""
    """Id of the driver, under which it claimed the run's lease."""
    fault_points: str = ""
    """Address of the test that injects faults and receives the fault points that are passed; empty without such a test."""
    begun_s: float = 0.0
    """When the run was first started, seconds since 1970; only a run with a deadline needs it."""
    compiled_key: str = dataclasses.field(default="", repr=False)
    """Secret key of the run's compile cache (``CompileCache``): it proves that no one else has changed the cached code. If it
    is empty, no code is cached."""

    @property
    def folder(self) -> Folder:
        """The run's folder."""
        return Folder(self.config.run.root) / self.config.run.id

    @property
    def compiled(self) -> CompileCache:
        """The cache of the run's compiled code (``torch.compile``)."""
        return CompileCache(self.folder, self.compiled_key, self.config)

    @property
    def keeps_snapshots(self) -> bool:
        """Whether the run keeps snapshots (copies of the training state) in the memory of nodes."""
        return bool(self.config.checkpoint.memory_every and self.config.checkpoint.stage)
