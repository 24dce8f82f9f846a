"""The section of objectives: what is minimised. ``config/schema.py`` explains the marks of fields, such as ``free``."""

from __future__ import annotations

from pydantic import Field, model_validator

from springtide.config.section import Section, free
from springtide.errors import explain

OBJECTIVES = ("distill", "dpo", "orpo")
"""Values of objective.source that are built in."""
OF_PAIRS = ("dpo", "orpo")
"""Built-in objectives that learn from pairs of answers."""
_WITHOUT_LABELS = "orpo"
L2SP = "l2sp"
"""Value of ``objective.anchor`` for a penalty in which the distances of all weights count alike."""


class ObjectiveConfig(Section):
    """What is minimised."""

    source: str = ""
    """``distill`` learns from a teacher or its stored labels; ``dpo`` from pairs of answers and a reference model's labels;
    ``orpo`` only from pairs of answers. Or your own function, ``package.module:function``, see ``springtide.model``. Empty:
    cross-entropy of next tokens [name]."""
    labels: str = free(default="")
    """Labels that the objective learns from: a model's log-probabilities for each row of shards.dataset, which ``springtide
    data prepare --label-by`` writes [url]."""
    teacher: str = ""
    """Teacher of distill: a checkpoint, or a run's folder for its newest checkpoint. The teacher runs in each step and replaces
    stored labels. Each worker holds all weights of the teacher [url]."""
    teacher_k: int = Field(64, ge=0)
    """Number of the teacher's most likely ids to learn from at each position; 0 is all ids [ids]."""
    cross_entropy: float = Field(0.0, ge=0, lt=1)
    """Share of the next-token cross-entropy in the loss of distill; the rest is the divergence from the teacher [ratio]."""
    beta: float = Field(0.1, gt=0)
    """DPO's beta; in ORPO the weight of the odds-ratio term, where the cross-entropy of the chosen answer has weight 1 [1]."""
    anchor: str = ""
    """Penalty for the distance from the weights that the run starts from, so that the model forgets less. ``l2sp``: all weights
    count alike. The URL of a Fisher information (``springtide train --fisher-tokens``): each weight counts by its importance
    (EWC). Empty: no penalty [url]."""
    anchor_weight: float = Field(1.0, gt=0)
    """Weight, in the loss per token, of the squared distance from the weights that the run starts from. With a Fisher
    information (importance of each weight, measured on some text), 1 counts that text as much as the new text [1]."""

    @property
    def code(self) -> str:
        """The user's function; empty if the objective is built in."""
        return "" if self.source in OBJECTIVES else self.source

    @model_validator(mode="after")
    def _check(self) -> ObjectiveConfig:
        if self.labels and not self.source:
            problem = (
                "need an objective that reads labels, and without objective.source the loss is next-token cross-entropy"
            )
            raise ValueError(
                explain(
                    "objective.labels",
                    self.labels,
                    problem,
                    "set objective.source, such as to distill, or leave this empty",
                )
            )
        if self.labels and self.source == _WITHOUT_LABELS:
            problem = f"would not be used: {self.source} learns only from pairs of answers"
            raise ValueError(
                explain("objective.labels", self.labels, problem, "leave this empty, or set objective.source to dpo")
            )
        if self.teacher and (self.labels or self.source in ("", *OF_PAIRS)):
            problem = "and objective.labels give the same targets, so only one of the two can be set"
            problem = problem if self.labels else f"is for distillation, and objective.source = {self.source!r}"
            raise ValueError(
                explain(
                    "objective.teacher",
                    self.teacher,
                    problem,
                    "leave this empty, or set objective.source to distill and no labels",
                )
            )
        if self.cross_entropy and self.source != "distill":
            raise ValueError(
                explain("objective.cross_entropy", self.cross_entropy, "is for objective.source = distill", "use 0")
            )
        return self
