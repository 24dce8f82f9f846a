"""The section of objectives: what is minimised. ``schema`` explains how fields are marked."""

from __future__ import annotations

from pydantic import Field, model_validator

from springtide.config.section import Section, free
from springtide.errors import explain

OBJECTIVES = ("distill", "dpo", "orpo")
"""Values of objective.source that are built in."""
OF_PAIRS = ("dpo", "orpo")
"""Those that learn from pairs of answers."""
_WITHOUT_LABELS = "orpo"
L2SP = "l2sp"
"""Value of ``objective.anchor``."""


class ObjectiveConfig(Section):
    """What is minimised."""

    source: str = ""
    """``distill``, from a teacher or its labels; ``dpo``, from pairs of answers and labels of a reference; ``orpo``, from pairs
    alone; or your own function, ``package.module:function``, see ``springtide.model``; empty is the cross-entropy of next
    tokens [name]."""
    labels: str = free(default="")
    """What a model says about each row of shards.dataset, for the objective: ``springtide data prepare --label-by`` writes it
    [url]."""
    teacher: str = ""
    """Checkpoint of a run, or that run's folder for its newest, that computes in each step what labels would hold: for distill,
    in place of labels; its weights are whole on each worker [url]."""
    teacher_k: int = Field(64, ge=0)
    """Ids at each position that the teacher names, its most likely ones; 0 is all [ids]."""
    cross_entropy: float = Field(0.0, ge=0, lt=1)
    """Share of the cross-entropy of next tokens in distill; the rest is the divergence from the teacher [ratio]."""
    beta: float = Field(0.1, gt=0)
    """DPO's beta; in ORPO the weight of the odds-ratio term beside the cross-entropy of the chosen answer [1]."""
    anchor: str = ""
    """What keeps the weights near those that the run starts from, so that it forgets less: ``l2sp`` pulls them all alike; the
    URL of a Fisher, see ``springtide train --fisher-tokens``, by how much each one matters (EWC); empty nothing [url]."""
    anchor_weight: float = Field(1.0, gt=0)
    """Weight of the squared distance to them in the loss per token; of a Fisher, 1 counts the text that it was computed on as
    much as the new one [1]."""

    @property
    def code(self) -> str:
        """The user's function; empty if the objective is built in."""
        return "" if self.source in OBJECTIVES else self.source

    @model_validator(mode="after")
    def _check(self) -> ObjectiveConfig:
        if self.labels and not self.source:
            problem = "are read by an objective, and objective.source is the cross-entropy of next tokens"
            raise ValueError(
                explain("objective.labels", self.labels, problem, "name one, such as distill, or no labels")
            )
        if self.labels and self.source == _WITHOUT_LABELS:
            problem = f"are read by nobody: {self.source} learns from pairs of answers alone"
            raise ValueError(explain("objective.labels", self.labels, problem, "leave them out, or use dpo"))
        if self.teacher and (self.labels or self.source in ("", *OF_PAIRS)):
            problem = "says what labels would say, and objective.labels are there"
            problem = problem if self.labels else f"is for distillation, and objective.source = {self.source!r}"
            raise ValueError(
                explain("objective.teacher", self.teacher, problem, "leave it empty, or use distill alone")
            )
        if self.cross_entropy and self.source != "distill":
            raise ValueError(
                explain("objective.cross_entropy", self.cross_entropy, "is for objective.source = distill", "use 0")
            )
        return self
