"""A run in Weights & Biases: settings, metrics, and how it ended. A resumed run continues where it was.

pip install wandb
springtide train --recipe tiny --track.listener examples.listeners.to_wandb:listen
"""

from collections.abc import Callable

import wandb

import springtide as st
from springtide.config import redact
from springtide.events import Evaluated, Event, StepDone, Stopped
from springtide.events.metrics import EVAL_METRICS, STEP_METRICS


def listen(run: st.Run) -> Callable[[Event], None]:
    settings = redact(run.config).model_dump(mode="json")
    page = wandb.init(
        project=run.config.track.experiment, id=run.id, resume="allow", config=settings, allow_val_change=True
    )
    page.define_metric("*", step_metric="step")  # W&B's own count only rises; steps are trained again after a restart

    def hear(event: Event) -> None:
        if isinstance(event, StepDone | Evaluated):
            table = STEP_METRICS if isinstance(event, StepDone) else EVAL_METRICS
            found = {metric.tracked: getattr(event, name) for name, metric in table.items()}
            page.log({"step": event.step} | {name: value for name, value in found.items() if value is not None})
        if isinstance(event, Stopped):
            page.finish(exit_code=int(event.status == "failed"))

    return hear
