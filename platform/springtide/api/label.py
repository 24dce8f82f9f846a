"""Label a dataset: write another model's predictions for each row. The labels are a separate folder that belongs to the
dataset."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from springtide.checkpoint.retention import hold, release
from springtide.config import Config
from springtide.dataset import Progress, in_process, silent
from springtide.errors import ConfigError, DamagedFile, explain
from springtide.run.text import Labeller, open_labeller
from springtide.shards import LABELS, LabelLayout, Labels, Manifest, id_type, load_labels, load_manifest, write_labels
from springtide.storage import Folder
from springtide.training.label import LabelJob, label_group
from springtide.training.label import release as release_model

_LARGE_GROUPS = 8
_WORK, _JOB, _MODEL = "work", "job.json", "model"


def label(
    dataset: str,
    by: str,
    what: Literal["topk", "logprob"],
    out: str,
    k: int = 64,
    progress: Progress | None = None,
    trust_code: bool = False,
) -> str:
    """Write a model's predictions for each row of a dataset, for a run to learn from (``objective.labels``).

    A small dataset is labelled in this process. A larger one is labelled by Ray Data actors, if Ray is installed: on the
    cluster that training would use, and on its GPUs if it has any. If labelling is killed, the same call resumes it later. On
    the same kind of device it then writes the same bytes as without the kill.

    Args:
        dataset: folder or URL of a sealed dataset; its training rows and its held-out rows are labelled.
        by: the model: a run's folder (its newest checkpoint is used), one checkpoint, or a ``transformers`` folder.
        what: the kind of labels. ``topk``: the ``k`` most likely next ids at each position and their log-probabilities;
            ``logprob``: the log-probability of the token that actually comes next.
        out: folder or URL to create; labels that the same call wrote there before are reused.
        k: number of ids at each position, for ``topk``.
        progress: called with the name of a stage of the labelling, its number of finished jobs, and its number of all jobs.
        trust_code: run the code of the user's own model if the run names one (``model.source``).

    Returns:
        The URL of the labels.

    Raises:
        ConfigError: the model does not fit the dataset, ``k`` is not from 1 to the size of the vocabulary, or ``out`` holds
            something else.
        CorpusError: the dataset is not sealed (complete).

    Examples:
        >>> from springtide.api.label import label
        >>> dataset = st.open_run("runs/mine").config.shards.dataset
        >>> label(dataset, "runs/mine", "topk", "labels/mine", k=4)  # doctest: +SKIP
        '/.../labels/mine'
    """
    source, target, work = Folder(dataset), Folder(out), Folder(out) / _WORK
    manifest = load_manifest(source)
    if what == "topk" and not 0 < k <= manifest.vocab_size:
        limit = f"must be from 1 to the {manifest.vocab_size} ids of the vocabulary"
        raise ConfigError(explain("k", k, limit, "64 is a usual choice"))
    model = open_labeller(by, manifest, trust_code)
    layout = LabelLayout(what, k if what == "topk" else 0, id_type(manifest.vocab_size), manifest.sequence_length)
    facts = Labels(dataset=manifest.digest, labeller=model.facts, groups={}, **layout._asdict())
    if _is_sealed(target, facts):
        return target.url
    work.write_json(_JOB, facts.model_dump(mode="json"))
    with _held(model, facts):
        by_model = model.model_at(work / _MODEL, manifest)
        jobs = [LabelJob(source.url, *place, by_model, layout, target, work) for place in _groups(manifest)]
        left = [job for job in jobs if not job.done()]
        for done, _ in enumerate(_run(left), start=len(jobs) - len(left) + 1):
            (progress or silent)("labelling", done, len(jobs))
    release_model()
    digests: dict[str, list[str]] = {}
    for job in jobs:
        digests.setdefault(job.shard, []).append(str(work.read_json(job.record)["digest"]))
    groups = {name: tuple(found) for name, found in digests.items()}
    write_labels(target, Labels.model_validate({**facts.model_dump(), "groups": groups}))
    work.remove()
    target.sweep()
    return target.url


def _is_sealed(target: Folder, facts: Labels) -> bool:
    """Return True if ``target`` holds complete labels of the model, dataset and options in ``facts``. Return False if it is
    empty or holds an unfinished part of such labels. Raises ConfigError if it holds anything else."""
    wanted = facts.model_dump(mode="json", exclude={"groups"})
    if target.exists(LABELS):
        found: Any = load_labels(target).model_dump(mode="json", exclude={"groups"})
        what = "holds other labels"
    elif (work := target / _WORK).exists(_JOB):
        try:
            found = work.read_json(_JOB)
        except DamagedFile as error:
            raise ConfigError(explain("out", target.url, str(error), "name another folder")) from None
        found = {name: value for name, value in found.items() if name != "groups"} if isinstance(found, dict) else {}
        what = "holds the beginning of other labels"
    else:
        if target.names():
            raise ConfigError(explain("out", target.url, "is not empty, and holds no labels", "name another folder"))
        return False
    other = [
        f"{name} {found.get(name)!r:.100}, not {value!r:.100}"
        for name, value in wanted.items()
        if found.get(name) != value
    ]
    if other:
        raise ConfigError(explain("out", target.url, f"{what}: {'; '.join(other)}", "name another folder"))
    return target.exists(LABELS)


def _groups(manifest: Manifest) -> Iterator[tuple[str, str, int, int, int]]:
    """Yield (split, shard, index of the row group in the shard, its first row in the split, its number of rows) for each row
    group of a dataset."""
    for name, split in manifest.splits.items():
        first = 0
        for shard in split.shards:
            for index, group in enumerate(shard.groups):
                yield name, shard.name, index, first, group.rows
                first += group.rows


def _run(jobs: Sequence[LabelJob]) -> Iterator[Any]:
    if len(jobs) <= _LARGE_GROUPS or importlib.util.find_spec("ray") is None:
        yield from in_process(label_group, jobs)
        return
    from springtide.ray.cluster.session import cluster
    from springtide.ray.data.prepare import ray_map_with_model

    with cluster(Config(), dashboard=False):
        yield from ray_map_with_model(label_group, jobs)


@contextlib.contextmanager
def _held(model: Labeller, facts: Labels) -> Iterator[None]:
    """Protect the labelling model's checkpoint during the ``with`` block. Otherwise its run, if it still trains, might remove
    the checkpoint while it is read. If the labelling is killed, the protection stays until the same labelling is resumed and
    ends."""
    who = f"labels-{facts.digest[:12]}"
    if model.checkpoint:
        # the run's folder is read-only, so no process removes its checkpoints and no protection is needed
        with contextlib.suppress(OSError):
            hold(model.folder, model.checkpoint, who)
    yield
    if model.checkpoint:
        with contextlib.suppress(OSError):
            release(model.folder, model.checkpoint, who)
