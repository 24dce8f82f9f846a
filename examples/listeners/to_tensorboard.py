"""A run's metrics in TensorBoard, in the run's folder.

pip install tensorboard
springtide train --recipe tiny --track.listener examples.listeners.to_tensorboard:listen
tensorboard --logdir runs
"""

from collections.abc import Callable

from torch.utils.tensorboard import SummaryWriter

import springtide as st
from springtide.events import Evaluated, Event, Started, StepDone, Stopped
from springtide.events.metrics import EVAL_METRICS, STEP_METRICS


def listen(run: st.Run) -> Callable[[Event], None]:
    folder = run.folder.where("tensorboard") if run.folder.is_local else f"tensorboard/{run.id}"
    writers: list[SummaryWriter] = []

    def hear(event: Event) -> None:
        if isinstance(event, Started | Stopped) and writers:
            writers.pop().close()
        if isinstance(event, Started):  # steps that are trained again replace what TensorBoard has of them
            writers.append(SummaryWriter(folder, purge_step=event.step + 1))
        elif isinstance(event, StepDone | Evaluated) and writers:
            for name, metric in (STEP_METRICS if isinstance(event, StepDone) else EVAL_METRICS).items():
                if (value := getattr(event, name)) is not None:
                    writers[0].add_scalar(metric.tracked, value, event.step, event.time_s)

    return hear
