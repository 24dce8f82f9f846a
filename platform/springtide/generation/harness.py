"""A text model as lm-evaluation-harness asks for it. The only file that imports ``lm_eval``.

    loglikelihood           (context, continuation) -> log-probability, whether it is the likeliest
    loglikelihood_rolling   a text -> its log-probability, in windows of a row that do not overlap in what they predict
    generate_until          (context, settings) -> the text up to a stop string

Requests are computed in batches, the longest first. As in training, a begin-of-text stands before each text.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import lm_eval
import lm_eval.api.metrics  # fills the registry of metrics
import lm_eval.api.task
import lm_eval.utils
import numpy as np
from huggingface_hub import constants
from jinja2 import BaseLoader, StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import METRIC_REGISTRY
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from springtide.errors import ConfigError, explain
from springtide.generation.model_pool import MapBatches
from springtide.generation.sampling import Sampling
from springtide.generation.task_files import check_task_files
from springtide.generation.text_model import TextModel

VERSION = str(lm_eval.__version__)
_MOST_TOKENS = 256
"""Most tokens of an answer whose task does not say, as in lm-evaluation-harness."""
_RESAMPLES = 1000
"""Resamples for the standard error of a metric that has no formula for it."""
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_REMEDY = (
    "mend its file, or give its data as local files (dataset_path: json, dataset_kwargs: {data_files: ...}): "
    "nothing is fetched"
)


class Scored(NamedTuple):
    """The scores of a task, or of a group of tasks."""

    metrics: dict[str, float]
    """Metric -> score; the name of a filter, unless it is ``none``, follows after a slash."""
    errors: dict[str, float]
    """Metric -> standard error, where there is one."""
    samples: int
    """Number of documents; 0 for a group."""
    version: str
    """The task's own."""


class Tasks:
    """Tasks that can be evaluated: their files are read, and their data is here."""

    def __init__(self, names: Sequence[str], files: str = "", trust_code: bool = False) -> None:
        """Load the tasks. Nothing is fetched.

        Args:
            names: of tasks, groups or tags.
            files: path of a folder of task files; empty for those of lm-evaluation-harness alone.
            trust_code: run the code that the files name.

        Raises:
            ConfigError: a task is not known, its data is not here, or its file names code that is not trusted.
        """
        if files:
            check_task_files(files, METRIC_REGISTRY, trust_code)
        self.names = list(dict.fromkeys(names))
        with _sandboxed(), _offline(), _own_metrics(trust_code):
            # those of the package are thousands of files, which take seconds to read
            manager = TaskManager(include_path=files, include_defaults=False) if files else None
            if manager is None or not {*self.names} <= {*manager.all_tasks}:
                manager = TaskManager(include_path=files or None)
            if unknown := [name for name in self.names if name not in manager.all_tasks]:
                where = f"in {files} or " if files else ""
                problem = f"is not a task {where}of lm-evaluation-harness {VERSION}"
                raise ConfigError(explain("tasks", unknown[0], problem, "name the folder of its file, --task-files"))
            with _seeded():
                self._loaded = self._load(manager)

    def _load(self, manager: Any) -> Any:
        """Return the tasks as lm-evaluation-harness holds them, ready to be evaluated."""
        try:
            found = manager.load(self.names)
        except ConfigError:
            raise
        except Exception as error:  # whatever a file can make its reader raise
            raise _not_loaded(", ".join(self.names), error) from error
        for task in found["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
        return found

    def score(
        self, model: TextModel, limit: int = 0, batch_size: int = 8, map_batches: MapBatches | None = None
    ) -> dict[str, Scored]:
        """Return the scores of each task and group. ``limit``: documents of each task; 0: all; ``map_batches``: computes the
        batches, as of ``model_pool``. ConfigError if a task cannot be evaluated."""
        with _sandboxed(), _offline(), _seeded():
            try:
                found = evaluate(
                    lm=Harness(model, batch_size, map_batches),
                    task_dict=self._loaded,
                    limit=limit or None,
                    log_samples=False,
                    bootstrap_iters=_RESAMPLES,
                )
            except ConfigError:
                raise
            except (ValueError, KeyError, TypeError, AttributeError, IndexError, TemplateError) as error:
                raise _not_loaded(", ".join(self.names), error) from error
        counts, versions = found.get("n-samples", {}), found.get("versions", {})
        return {
            name: Scored(*_figures(values), int(counts.get(name, {}).get("effective", 0)), str(versions.get(name, "")))
            for name, values in {**found.get("groups", {}), **found["results"]}.items()
        }


class Harness(TemplateLM):
    """Answers the requests of lm-evaluation-harness."""

    def __init__(self, model: TextModel, batch_size: int, map_batches: MapBatches | None = None) -> None:
        super().__init__()
        self._model, self._batch_size, self._map = model, batch_size, map_batches or self._map_here

    def _map_here(self, method: str, batches: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        """Compute one batch after another in this process."""
        return (getattr(self._model, method)(*batch) for batch in batches)

    @property
    def eot_token_id(self) -> int:
        return self._model.end

    @property
    def prefix_token_id(self) -> int:
        return self._model.begin[-1] if self._model.begin else self._model.end

    @property
    def tokenizer_name(self) -> str:
        return ""

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text, with those before it unless ``add_special_tokens`` is False."""
        ids = self._model.encode(string)
        return ids if add_special_tokens is False else [*self._model.begin, *ids]

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """As the base class, without a progress bar."""
        return list(super().loglikelihood(requests, disable_tqdm=True))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        """Return the log-probability of each text, each token given as much before it as a row holds."""
        pairs: list[tuple[list[int], list[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            windows = lm_eval.utils.get_rolling_token_windows(
                token_list=self._model.encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._model.max_length,
                context_len=1,
            )
            for window in map(lm_eval.utils.make_disjoint_window, windows):
                pairs.append(window)
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._logprobs(pairs), strict=True):
            totals[owner] += logprob
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        most = self._model.max_length
        pairs = []
        for _, context, continuation in requests:
            if len(continuation) > most:
                limit = f"has {len(continuation)} tokens, more than the {most} that the model reads at once"
                raise ConfigError(explain("continuation", "...", limit, "leave the task out"))
            kept = most + 1 - len(continuation)  # what does not fit is cut at the beginning
            pairs.append((context[-kept:] or [self.prefix_token_id], continuation))
        return self._logprobs(pairs)

    def _logprobs(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        batches = list(self._model.batches(pairs, self._batch_size))
        asked = [([pairs[number] for number in batch], self._batch_size) for batch in batches]
        for batch, scores in zip(batches, self._map("logprobs", asked), strict=True):
            for number, score in zip(batch, scores, strict=True):
                found[number] = score
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """Return the text after each context, up to its first stop string."""
        asked = [(self.tok_encode(request.args[0]), _Until.of(request.args[1])) for request in requests]
        order = sorted(range(len(asked)), key=lambda number: (asked[number][1], -len(asked[number][0]), number))
        found = [""] * len(asked)
        batches: list[list[int]] = []
        arguments: list[tuple[Any, ...]] = []
        while order:
            until = asked[order[0]][1]
            same = [number for number in order[: self._batch_size] if asked[number][1] == until]
            order = order[len(same) :]
            room = self._model.max_length - until.tokens
            if room <= 0:
                limit = f"must be less than the {self._model.max_length} tokens that the model reads at once"
                raise ConfigError(
                    explain("max_gen_toks", until.tokens, limit, "set it in the task's generation_kwargs")
                )
            prompts = [asked[number][0][-room:] or [self.prefix_token_id] for number in same]
            batches.append(same)
            arguments.append((prompts, until.tokens, until.sampling(len(found) - len(order)), until.stop))
        for batch, texts in zip(batches, self._map("continued", arguments), strict=True):
            for number, text in zip(batch, texts, strict=True):
                found[number] = text
        return found


class _Until(NamedTuple):
    """How an answer is written."""

    tokens: int
    temperature: float
    top_k: int
    top_p: float
    stop: tuple[str, ...]

    @classmethod
    def of(cls, settings: dict[str, Any]) -> _Until:
        """Return the ``generation_kwargs`` of a task."""
        until = settings.get("until") or []
        stop = (until,) if isinstance(until, str) else tuple(map(str, until))
        tokens = next((int(settings[name]) for name in _LENGTHS if settings.get(name)), _MOST_TOKENS)
        temperature = float(settings.get("temperature") or 0.0)
        if not settings.get("do_sample", temperature > 0):
            return cls(tokens, 0.0, 0, 1.0, stop)
        return cls(tokens, temperature or 1.0, int(settings.get("top_k") or 0), float(settings.get("top_p") or 1), stop)

    def sampling(self, seed: int) -> Sampling:
        """Return how tokens are drawn; ``seed``: of the first answer of a batch."""
        return Sampling(self.temperature, self.top_k, self.top_p, seed)


def _figures(values: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the metrics and standard errors of a result; what is not a finite number is skipped."""
    metrics: dict[str, float] = {}
    errors: dict[str, float] = {}
    for key, value in values.items():
        metric, comma, kind = str(key).partition(",")
        if not comma or isinstance(value, str | bool) or value is None or not math.isfinite(float(value)):
            continue
        bare = metric.removesuffix("_stderr")
        name = bare if kind == "none" else f"{bare}/{kind}"
        (metrics if bare == metric else errors)[name] = float(value)
    return metrics, errors


def _not_loaded(name: str, error: BaseException) -> ConfigError:
    reason = " ".join(str(error).split())[:300]
    return ConfigError(explain("tasks", name, f"cannot be used ({type(error).__name__}: {reason})", _REMEDY))


@contextlib.contextmanager
def _sandboxed() -> Iterator[None]:
    """Render the templates of task files in Jinja's sandbox: lm-evaluation-harness has none, and a template could run code."""
    before = lm_eval.utils.env
    inside = ImmutableSandboxedEnvironment(loader=BaseLoader(), undefined=StrictUndefined, keep_trailing_newline=True)
    inside.filters.update(before.filters)
    lm_eval.utils.env = inside
    try:
        yield
    finally:
        lm_eval.utils.env = before


@contextlib.contextmanager
def _own_metrics(trust_code: bool) -> Iterator[None]:
    """Refuse a metric that is a file or folder here: of a task of the harness's own, too, ``evaluate`` would run it."""
    before = lm_eval.api.task.get_metric

    def checked(name: str, hf_evaluate_metric: bool = False) -> Any:
        if (hf_evaluate_metric or name not in METRIC_REGISTRY) and Path(name).exists() and not trust_code:
            remedy = "work in another folder, or read it, then pass --trust-code, in Python trust_code=True"
            raise ConfigError(explain("metric", name, "names code to run: it is a file or folder here", remedy))
        return before(name, hf_evaluate_metric)

    lm_eval.api.task.get_metric = checked
    try:
        yield
    finally:
        lm_eval.api.task.get_metric = before


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """Seed what shuffles documents as lm-evaluation-harness does, and leave the state of the generators as it was."""
    before = random.getstate(), np.random.get_state()
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Fetch nothing, also if these packages were imported before the environment said so."""
    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before
