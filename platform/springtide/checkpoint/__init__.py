"""A step you can come back to, at another world size. Rule: committed last; no file belongs to a rank's own history.

    tensors    model and optimizer -> named tensors, and the box of each that a rank holds
      |
    stage      copied into shared memory while the next step computes
      |
    saver      one save at a time, from a process that has neither torch nor the training's GIL: writer
      |
    write      blocks digested, what changed written, the manifest, and last COMMITTED
      |
    layout     what lies where; which count                leases   who may write: the newest claim
    strict     what names and numbers a manifest and an index may hold (pure)
    load       any box of any tensor, verified as it streams in
    restore    the newest good checkpoint      recheck       two readers must agree that bytes are bad
                                               fresh_start   a run that has committed never begins at step 0 by itself
    retention  which to keep, which files nobody needs (pure)

The modules without torch are imported by the writing process, so this one imports nothing.
"""
