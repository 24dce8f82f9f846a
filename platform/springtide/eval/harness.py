"""Adapter that lets lm-evaluation-harness evaluate a ``TextModel``, also a model that transformers cannot load. The only file
that imports ``lm_eval``. As in training, the begin-of-text token precedes each text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import evaluate
import lm_eval
import lm_eval.utils
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from springtide.errors import ConfigError, SpringtideError, explain
from springtide.eval.sampling import Sampling
from springtide.eval.text_model import BATCH_SIZE, TextModel

_MOST_TOKENS = 256
"""Most tokens of an answer if the task sets no limit, as in lm-evaluation-harness."""
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


def score(
    open_model: Callable[[], TextModel], names: list[str], limit: int, batch_size: int, trust_code: bool
) -> tuple[dict[str, dict[str, float]], str]:
    """Evaluate a model on tasks that come with lm-evaluation-harness.

    Args:
        open_model: function that loads the model; called only if all ``names`` are known.
        names: names of tasks, groups or tags.
        limit: number of documents to evaluate from each task; 0: all.
        batch_size: number of requests that are computed together.
        trust_code: allow metrics of the package ``evaluate``, which are code from the Hugging Face Hub or from a local folder.

    Returns:
        Two values. A dict: task -> {metric and filter, such as ``acc,none``: score}, without scores that are not finite. And
        the harness's table of the scores, in Markdown.

    Raises:
        ConfigError: a name is not known, a task cannot be used, or a task needs code that is not trusted.
    """
    known = TaskManager()
    if unknown := [name for name in names if name not in known.all_tasks]:  # lm_eval would also accept file paths
        problem = f"is not a task of lm-evaluation-harness {lm_eval.__version__}"
        raise ConfigError(explain("tasks", unknown[0], problem, "`lm_eval ls tasks` lists them"))
    model, load = Harness(open_model(), batch_size), evaluate.load
    evaluate.load = load if trust_code else _refuse
    try:
        found = lm_eval.simple_evaluate(model, tasks=names, task_manager=known, limit=limit or None, log_samples=False)
    except _Untrusted as error:
        problem = "is code of the Hugging Face Hub, or of a folder of that name here"
        raise ConfigError(explain("metric", str(error), problem, "leave the task out, or pass --trust-code")) from None
    except SpringtideError:
        raise
    except Exception as error:  # a task, its data or the Hub may raise anything
        reason = f"cannot be used ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
        raise ConfigError(explain("tasks", ",".join(names), reason, "leave the task out")) from error
    finally:
        evaluate.load = load
    figures = {
        name: {key: one for key, one in values.items() if isinstance(one, int | float) and math.isfinite(one)}
        for name, values in {**found["results"], **found.get("groups", {})}.items()
    }
    return figures, lm_eval.utils.make_table(found)


class _Untrusted(BaseException):
    """Raised if a task needs a metric of the package ``evaluate``. Derived from BaseException, because lm-evaluation-harness
    would catch an Exception and continue without the metric."""


def _refuse(path: str, *_: Any, **__: Any) -> None:
    raise _Untrusted(path)


class Harness(TemplateLM):
    """Answers the requests of lm-evaluation-harness with a ``TextModel``. Pass it to ``lm_eval.simple_evaluate``."""

    def __init__(self, model: TextModel, batch_size: int = BATCH_SIZE) -> None:
        super().__init__()
        self._model, self._batch_size = model, batch_size

    @property
    def eot_token_id(self) -> int:
        return self._model.end

    @property
    def prefix_token_id(self) -> int:
        return self._model.begin[-1] if self._model.begin else self._model.end

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text, preceded by the model's ``begin`` ids unless ``add_special_tokens`` is False."""
        ids = self._model.encode(string)
        return ids if add_special_tokens is False else [*self._model.begin, *ids]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        """Return the log-probability of each text. A text longer than a row is split into windows; no token counts twice."""
        begin, most, totals = self.prefix_token_id, self._model.max_length, list[float]()
        for request in requests:
            windows = lm_eval.utils.get_rolling_token_windows(self._model.encode(request.args[0]), begin, most, 1)
            pairs = [lm_eval.utils.make_disjoint_window(one) for one in windows]
            totals.append(math.fsum(logprob for logprob, _ in self._model.logprobs(pairs, self._batch_size)))
        return totals

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        pairs = []
        for _, context, continuation in requests:
            kept = max(1, self._model.max_length + 1 - len(continuation))  # drop the first ids of a long context
            pairs.append((context[-kept:] or [self.prefix_token_id], continuation))
        return self._model.logprobs(pairs, self._batch_size)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """Return the generated text after each request's context, up to the first stop string."""
        alike, found = dict[tuple[int, Sampling, tuple[str, ...]], list[int]](), [""] * len(requests)
        for number, request in enumerate(requests):
            alike.setdefault(_until(request.args[1]), []).append(number)
        for (tokens, sampling, stop), numbers in alike.items():
            if (room := self._model.max_length - tokens) <= 0:
                limit = f"must be less than the {self._model.max_length} tokens that the model reads at once"
                raise ConfigError(explain("max_gen_toks", tokens, limit, "leave the task out"))
            prompts = {one: self.tok_encode(requests[one].args[0])[-room:] or [self.prefix_token_id] for one in numbers}
            order = sorted(numbers, key=lambda number: -len(prompts[number]))
            for first in range(0, len(order), self._batch_size):
                batch, seeded = order[first : first + self._batch_size], dataclasses.replace(sampling, seed=first)
                texts = self._model.continued([prompts[one] for one in batch], tokens, seeded, stop)
                for number, text in zip(batch, texts, strict=True):
                    found[number] = text
        return found


def _until(settings: Mapping[str, Any]) -> tuple[int, Sampling, tuple[str, ...]]:
    """Return the token limit, the sampling and the stop strings of a task's ``generation_kwargs``."""
    until = settings.get("until") or []
    stop = (until,) if isinstance(until, str) else tuple(map(str, until))
    tokens = next((int(settings[name]) for name in _LENGTHS if settings.get(name)), _MOST_TOKENS)
    temperature = float(settings.get("temperature") or 0.0)
    if not settings.get("do_sample", temperature > 0):
        return tokens, Sampling(0.0), stop
    top_k, top_p = int(settings.get("top_k") or 0), float(settings.get("top_p") or 1)
    return tokens, Sampling(temperature or 1.0, top_k, top_p), stop
