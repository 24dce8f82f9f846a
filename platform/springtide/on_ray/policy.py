"""Which failures of a worker group are worth another try. The only file that touches Ray Train's failure policy."""

from __future__ import annotations

from typing import Any

from ray.train import FailureConfig
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.failure_handling.default import DefaultFailurePolicy
from ray.train.v2._internal.execution.failure_handling.failure_policy import FailureDecision

from springtide.errors import SpringtideError


class FailurePolicy(DefaultFailurePolicy):
    """Ray's own, but an error of ours is not tried again: it would come again."""

    def make_decision(self, training_failed_error: Any) -> FailureDecision:
        """RAISE for an error of ours, else what Ray decides."""
        if fatal(training_failed_error) is not None:
            return FailureDecision.RAISE
        return super().make_decision(training_failed_error)


def fatal(error: Any) -> SpringtideError | None:
    """Our own error among the workers' failures, if there is one."""
    for failure in getattr(error, "worker_failures", {}).values():
        for candidate in (failure, getattr(failure, "cause", None)):  # Ray wraps what an actor's call raised
            if isinstance(candidate, SpringtideError):
                return candidate
    return None


class Trainer(TorchTrainer):
    """TorchTrainer with our failure policy."""

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        limits = self.run_config.failure_config or FailureConfig()
        return super()._initialize_and_run_controller(**{**arguments, "failure_policy": FailurePolicy(limits)})
