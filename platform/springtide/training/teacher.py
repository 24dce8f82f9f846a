"""The teacher of a distillation run (``objective.teacher``): a second model, whole on each rank. It computes labels in the
step, in place of labels that were stored before.

    ids of a micro-batch -> teacher, without gradient -> its most likely next ids with log-probabilities -> objective

The labels of a row depend only on the row, and the teacher gets the micro-batches of the student. So with exact sums a run has
the same bits at any world size. The teacher's weights are read from its own run at each start. This run's checkpoints do not
contain them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from springtide import config as configs
from springtide.checkpoint.branch import resolve, split
from springtide.checkpoint.format import FISHER, Manifest, Meta, read_manifest
from springtide.checkpoint.load import load
from springtide.checkpoint.restore import Restored
from springtide.config import Config
from springtide.distributed import gathered, rank_here
from springtide.distributed.fsdp import in_precision
from springtide.errors import CheckpointError, ConfigError, SpringtideError, explain, redacted
from springtide.model import Decoder, make
from springtide.model.objective import Columns, Objective
from springtide.shards import LabelLayout, id_type
from springtide.shards import Manifest as Dataset
from springtide.stream import Data
from springtide.training.anchor import check_digests, digest_of
from springtide.training.label import check_reads, most_likely
from springtide.training.part import Part

FIELD = "objective.teacher"
_COMPONENT = "teacher"


class Teacher(Part):
    """The teacher model of a config. Its weights are read in ``begin``."""

    def __init__(
        self,
        config: Config,
        vocab_size: int,
        eos_id: int | None,
        bos_id: int | None,
        whole_documents: bool,
        device: torch.device,
    ) -> None:
        """``vocab_size``, ``eos_id``, ``bos_id`` and ``whole_documents`` describe the data, as for the student model
        (``model.make``). Raises ConfigError if the checkpoint of ``objective.teacher`` does not exist."""
        self._url, self._manifest, saved = _read(config.objective.teacher)
        self._vocab_size, self._digest = vocab_size, ""
        k = min(config.objective.teacher_k, vocab_size) or vocab_size
        self.layout = LabelLayout("topk", k, id_type(vocab_size), config.shards.sequence_length)
        """Layout of the label columns that the teacher computes."""
        model = make(saved.model, vocab_size, eos_id, bos_id, whole_documents)
        if isinstance(model, Decoder):
            model.place(device)
        else:
            model.to(device)
        self._model: nn.Module = in_precision(model.eval().requires_grad_(False), saved.parallel)

    def begin(self, found: Restored | None) -> None:
        """Read the teacher's weights at the first call; all ranks call it together.

        Raises:
            ConfigError: the teacher's checkpoint has vanished or is damaged.
            CheckpointError: the restored state was trained with other teacher weights than those read now.
            OSError: the store cannot be reached.
        """
        if not self._digest:
            self._load()
        if found is not None:
            check_digests(found.meta, _COMPONENT, self._digests, f"{FIELD} would teach something else")

    def _load(self) -> None:
        fatal: Exception | None = None
        try:
            load(*split(self._url), self._model, manifest=self._manifest)
        except CheckpointError as error:
            what = f"is read at every start, and cannot be: {error}"
            fatal = ConfigError(explain(FIELD, self._url, what, "bring it back; each checkpoint of this run needs it"))
        except (SpringtideError, OSError) as error:
            fatal = error
        except Exception as error:  # any error: this rank must still reach ``gathered``, where all ranks wait
            fatal = RuntimeError(f"rank {rank_here()} cannot read the teacher: {type(error).__name__}: {error}")
        for found in gathered(fatal):
            if found is not None:
                raise found
        self._digest = digest_of(*split(self._url), self._manifest)

    def describe(self, meta: Meta) -> Meta:
        return meta.adding({_COMPONENT: self._digests})

    @torch.no_grad()
    def __call__(self, rows_BL: Tensor) -> Columns:
        """Return the label columns of rows of ids, int64 (B, L): ``logprobs``, fp32 (B, L, k), and ``ids``, int64 (B, L, k)."""
        log_BLV = self._model(rows_BL).float().log_softmax(-1)
        logprobs_BLK, ids_BLK = most_likely(log_BLV, self.layout.k, self._vocab_size)
        return {"logprobs": logprobs_BLK, "ids": ids_BLK}

    @property
    def _digests(self) -> dict[str, str]:
        return {redacted(self._url): self._digest}


def objective_of(config: Config, data: Data, device: torch.device) -> tuple[Objective | None, Teacher | None]:
    """Return the objective of a run of ``config``, and its teacher model. The objective is None if the run minimises the
    cross-entropy of next tokens. The teacher is None if the objective has no teacher."""
    one, ids = config.objective, data.document_ids
    if not one.source:
        return None, None
    teacher = Teacher(config, data.vocab_size, *ids, device) if one.teacher else None
    layout = teacher.layout if teacher else data.labels.layout if data.labels else None
    return Objective(one.source, data.vocab_size, device, layout, one, *ids, teacher), teacher


def check_teacher(config: Config, dataset: Dataset) -> None:
    """Check, before a run of ``config`` begins, that its teacher can read the rows of ``dataset``. Raises ConfigError if
    not."""
    url, manifest, saved = _read(config.objective.teacher)
    if saved.model.source and saved.model.source != config.model.source:
        problem = f"is a model of {saved.model.source!r}, and only code that this run's settings name is run"
        remedy = (
            "write its labels with `springtide data prepare --label-by --trust-code`, and name them in objective.labels"
        )
        raise ConfigError(explain(FIELD, url, problem, remedy))
    check_reads(FIELD, url, saved.model, manifest.meta.tokenizer_digest, dataset)


def _read(url: str) -> tuple[str, Manifest, Config]:
    """Return the teacher's checkpoint: its full URL, its manifest, and the config that it was saved with. Raises ConfigError if
    it cannot be used as a teacher. ``url``: value of ``objective.teacher``, which may name a run instead of a checkpoint."""
    url = resolve(url, "", FIELD)
    try:
        manifest = read_manifest(*split(url))
    except CheckpointError as error:
        raise ConfigError(explain(FIELD, url, f"cannot be used: {error}", "name another checkpoint")) from None
    if FISHER in manifest.meta.labels:
        raise ConfigError(
            explain(
                FIELD, url, "holds a Fisher and no weights", "set objective.teacher to the run of the Fisher's model"
            )
        )
    if not manifest.config:
        problem = "was saved by a training loop of your own, without the settings of its model"
        raise ConfigError(
            explain(FIELD, url, problem, "set objective.teacher to a run of springtide train, or to an imported model")
        )
    return url, manifest, configs.build_stored(manifest.config)
