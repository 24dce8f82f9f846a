"""Moving average of the weights, as a part (feature of a step). It sets the share of the newest weights in the average.
``springtide.optim.average`` updates the average."""

from __future__ import annotations

import math

from springtide.config import Config
from springtide.config.steps import StepsDone, one_more
from springtide.optim.average import set_newest_share
from springtide.training.part import Part, Work
from springtide.training.state import TrainState


def newest_share(config: Config, step: StepsDone, tokens_before: int = 0) -> float:
    """Return the share, 0 to 1, of the newest weights in the moving average at step ``step``; 0 if the run has no average.
    ``tokens_before``: tokens of earlier training stages, as in ``TrainState``."""
    if not config.optim.ema_half_life:
        return 0.0
    rate = math.log(2.0) / config.optim.ema_half_life
    tokens = config.tokens_after(step)
    newest = tokens - config.tokens_after(step - 1)
    # the share of old weights falls by a factor of exp(-rate) per token. All shares add up to 1, so the initial weights get
    # none
    return math.expm1(-rate * newest) / math.expm1(-rate * (tokens_before + tokens))


class WeightAverage(Part):
    """Sets, before each step, the share of this step's weights in the moving average."""

    def __init__(self, config: Config, state: TrainState) -> None:
        self._config, self._state = config, state

    def before_step(self, work: Work) -> None:
        share = newest_share(self._config, one_more(work.step), self._state.tokens_before)
        set_newest_share(self._state.optimizer, share)
