"""The text sample at the end of a run. The worker group generates it with the sharded model, so no process needs memory for
the whole model."""

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
"""Time limit of a sample [s]. It can take long because a large model gathers all its weights for each token."""


class Closing(Part):
    """The end of a run, after the last save: the last evaluation, if it was not done before the save, and a text sample."""

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
    """Generate up to ``train.sample_tokens`` token ids after the prompt; 0 generates none. Yields the text, or a warning with
    the reason why there is no text.

    All ranks call it together and get the same text. If ``model`` computes in fp32, ``springtide.sample`` generates the same
    text from a checkpoint."""
    if not config.train.sample_tokens:
        return
    try:
        manifest, vocabulary = open_dataset(data.corpora[0].url) if world.is_first else (None, None)
        prompt, end = _prompt_of(manifest, vocabulary, SAMPLE_PROMPT) if manifest and vocabulary else ([], 0)
        problem = ""
    except Exception as error:  # any error: tokenizers raises plain Exception, and the other ranks wait for this rank
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
            # all ranks use the ids that rank 0 draws: another device might round differently and end the text earlier or later
            agree=agreed,
        )
        return ids

    with uncompiled():  # each new token makes the input longer, and each new shape would be compiled
        begin = time.perf_counter()
        written(1)
        most = int(_MOST_S / (time.perf_counter() - begin))
        ids = written(agreed(max(1, min(most, config.train.sample_tokens))))
    model.train()
    yield Sampled(step=step, prompt=SAMPLE_PROMPT, text=agreed(vocabulary.decode(ids) if vocabulary else ""))


def _prompt_of(manifest: Manifest, vocabulary: Any, prompt: str) -> tuple[list[int], int]:
    """Return the ids of the prompt as in training, and the end-of-document id. The ids are the begin-of-text id and the text,
    without the special tokens that the tokenizer file would add. ``vocabulary``: the dataset's tokenizer."""
    [ids] = vocabulary.encode([prompt])
    return [manifest.begin_of_text, *ids[:-1].tolist()], manifest.end_of_text
