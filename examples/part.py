"""A part of your own: counts the rows of each step that end in padding or hold tokens that are not predicted, over all
ranks, and ends the run when the loss is low enough.

springtide train --recipe tiny --train.parts examples.part:parts
"""

from springtide.training import Part, Share, StepMessage, StepResult, TrainLoop, Verdict

LOW_ENOUGH = 2.0
"""Loss at which the run is saved and ends [nats]."""


class ShortRows(Part):
    def contribute(self, message: StepMessage, share: Share) -> None:
        length = share.work.rows.shape[1] - 1
        message.sum("short rows", (share.row_tokens < length).sum())

    def receive(self, result: StepResult) -> None:
        result.extra["short_rows"] = result.agreed["short rows"]

    def verdict(self, result: StepResult) -> Verdict:
        return Verdict.STOP if result.loss < LOW_ENOUGH else Verdict.CONTINUE


def parts(loop: TrainLoop) -> Part:
    return ShortRows()
