"""The text sample at the end of a run. The worker group writes it with the model sharded as it is: no process needs memory
for the whole model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from springtide.config.schema import SAMPLE_PROMPT, SAMPLE_TEMPERATURE, Config
from springtide.config.steps import StepsDone
from springtide.dataset import open_dataset
from springtide.distributed import World, agreed
from springtide.distributed.compiled import uncompiled
from springtide.eval import Sampling, write
from springtide.events import Event, Sampled, Warned
from springtide.shards import Manifest
from springtide.stream import Data
from springtide.training.evaluate import Evaluations
from springtide.training.part import Part, Verdict
from springtide.training.state import TrainState

_MOST_S = 60.0
"""Time limit of a sample: a large model gathers all its weights for each token [s]."""


class Closing(Part):
    """After the last save: the last evaluation, if there was no time for it before, and a sample."""

    def __init__(
        self, config: Config, data: Callable[[], Data], world: World, state: TrainState, evaluations: Evaluations
    ) -> None:
        self._config, self._data, self._world, self._state = config, data, world, state
        self._evaluations = evaluations

    def at_end(self, verdict: Verdict) -> Iterator[Event]:
        if verdict is Verdict.FINISH:
            yield from self._evaluations.now()
            yield from write_sample(self._state.model, self._data(), self._world, self._config, self._state.step)


def write_sample(
    model: nn.Module, data: Data, world: World, config: Config, step: StepsDone
) -> Iterator[Sampled | Warned]:
    """Write a text of ``train.sample_tokens`` ids after the prompt, unless that is 0, and yield it, or why there is none. All
    ranks call this, and the text is the same on all. ``springtide.sample`` writes the same from a checkpoint in fp32, if
    ``model`` computes in fp32."""
    if not config.train.sample_tokens:
        return
    try:
        manifest, vocabulary = open_dataset(data.corpora[0].url) if world.is_first else (None, None)
        prompt, end = _prompt_of(manifest, vocabulary, SAMPLE_PROMPT) if manifest and vocabulary else ([], 0)
        problem = ""
    except Exception as error:  # tokenizers raises no narrower type, and the other ranks wait for this one
        vocabulary, prompt, end, problem = None, [], 0, f"the tokenizer cannot be read: {error}"
    prompt, end, problem = agreed((prompt, end, problem))
    if problem:
        yield Warned(step=step, reason=f"no sample is written: {problem}")
        return
    context = min(config.model.written_length, data.sequence_length)

    def written(length: int) -> list[int]:
        [ids] = write(
            model,
            [prompt],
            length,
            max_context=context,
            vocab_size=data.vocab_size,
            sampling=Sampling(SAMPLE_TEMPERATURE),
            ends=[end],
            # all ranks use the draw of rank 0: another device might round differently, and end the text elsewhere
            agree=agreed,
        )
        return ids

    with uncompiled():  # each new token makes another shape
        begin = time.perf_counter()
        written(1)
        most = int(_MOST_S / (time.perf_counter() - begin))
        ids = written(agreed(max(1, min(most, config.train.sample_tokens))))
    model.train()
    yield Sampled(step=step, prompt=SAMPLE_PROMPT, text=agreed(vocabulary.decode(ids) if vocabulary else ""))


def _prompt_of(manifest: Manifest, vocabulary: Any, prompt: str) -> tuple[list[int], int]:
    """Return the ids to begin with, as training saw them (the begin-of-text id and the text, without the tokenizer file's own
    special tokens before or after), and the end-of-document id. ``vocabulary``: the dataset's tokenizer."""
    [ids] = vocabulary.encode([prompt])
    return [manifest.begin_of_text, *ids[:-1].tolist()], manifest.end_of_text
