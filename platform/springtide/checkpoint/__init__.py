"""Save the training state of a step, and restore it at any world size (number of ranks).

A checkpoint is complete once its last file exists: the commit marker COMMITTED. Seeds of random generators and the position in
the data are computed from the step, not saved for each rank. So any number of ranks can load a checkpoint.

    tensors      model and optimizer as named tensors, and the box (offsets and sizes) of each tensor that a rank holds
      |
    staging      copy the boxes to shared memory while the next step computes
      |
    async_saver  one save at a time, in a process without torch and with its own GIL (writer_process)
      |
    commit       hash blocks of 4 MiB, write the boxes that changed, then the manifest, and COMMITTED last
      |
    format       file layout; which checkpoints a run may restore
    leases       who may write a run: only the holder of its newest lease file
    validate     check the names and numbers in a manifest and an index (pure)
    load         read any box of any tensor, and verify it while it is read
    restore      load the newest checkpoint that is not damaged
    second_reader  a checkpoint counts as damaged only if two ranks find it damaged
    fresh_start  a run that has committed a checkpoint restarts at step 0 only if its user asks for it
    retention    which checkpoints to keep, which files to remove (pure)

    snapshots        copies of the training state in the memory of nodes
    snapshot_commit  write a snapshot to storage while no worker group trains
    snapshot_parts   each rank's description of its part of a snapshot (pure)

    checkpointer  saves and restores for your own training loop

The writer process must not import torch. So this file imports ``Checkpointer``, which needs torch, only when it is used.
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
