"""Save the state of a step and restore it at any world size. The commit marker is written last.
No file depends on a rank's history.

    tensors      model and optimizer as named tensors, and the box of each that a rank holds
      |
    staging      copy the boxes to shared memory while the next step computes
      |
    async_saver  one save at a time, in a process without torch and with its own GIL (writer_process)
      |
    commit       hash the blocks, write the changed pieces, then the manifest, and COMMITTED last
      |
    format       file layout; which checkpoints count      leases         who may write: the newest lease
    validate     which names and numbers a manifest and an index may hold (pure)
    load         read any box of any tensor, and verify it while it is read
    restore      load the newest good checkpoint           second_reader  two readers must agree that bytes are bad
                                                           fresh_start    no silent restart at step 0 after a commit
    retention    which checkpoints to keep, which files to remove (pure)

    snapshots    the state in the memory of nodes          snapshot_commit  commit a snapshot while no group trains
                                                           snapshot_parts   each rank's description of its part (pure)

    checkpointer  saves and restores for your own training loop

The writer process must not import torch, so this file imports the checkpointer only when the attribute is used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from springtide.checkpoint.checkpointer import Checkpointer

__all__ = ["Checkpointer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'springtide.checkpoint' has no attribute {name!r}")
    from springtide.checkpoint.checkpointer import Checkpointer

    return Checkpointer
