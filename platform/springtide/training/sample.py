"""The text that a run ends with, written by the group of workers with the model as they hold it: nobody else ever needs the
room for all of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from springtide.config.schema import SAMPLE_PROMPT, SAMPLE_TEMPERATURE, Config
from springtide.dataset import open_dataset
from springtide.dist import World
from springtide.events import Sampled, Warned
from springtide.parallel import uncompiled
from springtide.stream import Data
from springtide.training.evaluate import generate

_MOST_S = 60.0
"""No more tokens are drawn than a large model writes in this time, with all its weights gathered for each."""
_T = TypeVar("_T")


def write_sample(model: nn.Module, data: Data, world: World, config: Config, step: int) -> Iterator[Sampled | Warned]:
    """Text of ``train.sample_tokens`` ids after the prompt, if that is any, the same on every rank, all of which call this; or
    why there is none. A checkpoint read by ``springtide.sample`` in fp32 writes the same, if ``model`` computes in fp32."""
    if not config.train.sample_tokens:
        return
    try:
        vocabulary = open_dataset(data.datasets[0])[1] if world.is_first else None
        prompt, end = prompt_of(vocabulary, SAMPLE_PROMPT) if vocabulary else ([], 0)
        problem = ""
    except Exception as error:  # tokenizers raises nothing narrower, and the other ranks wait for this one
        vocabulary, prompt, end, problem = None, [], 0, f"the vocabulary cannot be read: {error}"
    prompt, end, problem = _of_first((prompt, end, problem))
    if problem:
        yield Warned(step=step, reason=f"no sample is written: {problem}")
        return
    context = min(config.model.max_sequence_length, data.sequence_length)

    def write(length: int) -> list[int]:
        # the draw of rank 0 is everybody's: elsewhere another device might round another way, and end elsewhere
        return generate(model, prompt, length, context, data.vocab_size, SAMPLE_TEMPERATURE, 0, end, _of_first)

    with uncompiled():  # each token more is another shape
        begin = time.perf_counter()
        write(1)
        most = int(_MOST_S / (time.perf_counter() - begin))
        ids = write(_of_first(max(1, min(most, config.train.sample_tokens))))
    model.train()
    yield Sampled(step=step, prompt=SAMPLE_PROMPT, text=_of_first(vocabulary.decode(ids) if vocabulary else ""))


def prompt_of(vocabulary: Any, prompt: str) -> tuple[list[int], int]:
    """Returns the ids to begin with, as training saw them (no special token of the file's own before or after), and the id that
    ends a document. ``vocabulary``: of the dataset."""
    [ids] = vocabulary.encode([prompt])
    return ids[:-1].tolist() or [vocabulary.end_of_text], vocabulary.end_of_text


def _of_first(value: _T) -> _T:
    """What rank 0 has."""
    found = [value]
    dist.broadcast_object_list(found)
    return found[0]
