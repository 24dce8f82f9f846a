"""Generate ids after prompts, in batches, with a cache of keys and values.

prompts   [a b c]  [d]          of any lengths up to the model's context
window    [a b c]  [. . d]      the ids that the model reads, padded at the start: no token attends to the padding
cache     each step adds one id to each row; a row that has ended leaves the batch
          long prompts are read in parts: an attention mask has a value for each pair of a new and an earlier id, and for all
          pairs at once it would need too much memory
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from springtide.eval.sampling import Sampling, draw
from springtide.model import Decoder, KVCache

_PADDING = 0
"""Id of padding; any id will do, because no token attends to padding."""
_MASK_PAIRS = 2**25
"""Most elements of an attention mask in memory at once: one for each pair of a new token and an earlier token in each row."""


@dataclasses.dataclass
class _Row:
    """A text that is being generated: the prompt's ids and the ids after it."""

    number: int
    ids: list[int]
    begin: int
    """Index in ``ids`` of the first id that the model still reads; earlier ids are out of its context."""
    generator: torch.Generator

    @property
    def window(self) -> list[int]:
        """The ids that the model reads: the text without the ids that are out of the context."""
        return self.ids[self.begin :]


@torch.no_grad()
def write(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    length: int,
    *,
    max_context: int,
    vocab_size: int,
    sampling: Sampling,
    ends: Collection[int] = (),
    listen: Callable[[int, int], bool] = lambda row, drawn: False,
    agree: Callable[[list[int]], list[int]] = lambda drawn: drawn,
) -> list[list[int]]:
    """Return up to ``length`` ids after each prompt. A row's ids depend on no other row, except through rounding.

    When a text gets longer than ``max_context``, the cache of keys and values is built anew from the text's last
    ``max_context // 2`` ids. A user's own model has no cache: for each new id it reads the last ``max_context`` ids again.

    Args:
        model: maps ids (B, L) to logits (B, L, V); left in ``eval`` mode.
        prompts: ids, at least one each.
        length: most ids to write after each prompt.
        max_context: most ids that the model reads at once.
        vocab_size: only ids below it are drawn.
        sampling: how ids are drawn; row i draws with the seed plus i.
        ends: ids that end a text; they are not returned.
        listen: called with the number of a row and its new id; returns True to end the row's text with this id.
        agree: for a sharded model: maps the ids drawn on this rank to the ids that all ranks use. All ranks must call
            ``write``.
    """
    generators = sampling.generators(len(prompts))
    rows = [
        _Row(number, list(ids), max(0, len(ids) - max_context), generators[number])
        for number, ids in enumerate(prompts)
    ]
    active, reader = list(rows), _Reader(model, max_context)
    model.eval()
    for _ in range(length):
        if not active:
            break
        logits_BV = reader.next_logits(active)[:, :vocab_size].float().cpu()
        drawn = agree(draw(logits_BV, sampling, [row.generator for row in active]))
        left = []
        for place, (row, chosen) in enumerate(zip(active, drawn, strict=True)):
            if chosen in ends:
                continue
            row.ids.append(chosen)
            if not listen(row.number, chosen):
                left.append(place)
        if len(left) < len(active):
            active = [active[place] for place in left]
            reader.keep(left)
    return [row.ids[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


class _Reader:
    """Runs the model on the new ids of each row. A model without a cache runs on all ids of its context each time."""

    def __init__(self, model: nn.Module, max_context: int) -> None:
        self._model, self._max_context = model, max_context
        self._device = next(model.parameters()).device
        self._past: KVCache | None = None

    def next_logits(self, rows: Sequence[_Row]) -> Tensor:
        """Return the logits for the next id of each row, (B, V)."""
        if isinstance(self._model, Decoder):
            return self._cached(self._model, rows)
        windows = [row.ids[-self._max_context :] for row in rows]
        longest = max(map(len, windows))
        ids_BL = self._tensor(
            [[*ids, *[_PADDING] * (longest - len(ids))] for ids in windows]
        )  # padding at the end changes no logit before it, because the model is causal
        last_B = torch.tensor([len(ids) - 1 for ids in windows], device=self._device)
        return self._model(ids_BL)[torch.arange(len(rows), device=self._device), last_B]

    def keep(self, places: Sequence[int]) -> None:
        """Drop the cached keys and values of all rows except those at the batch indices ``places``."""
        if self._past is not None and places:
            self._past.keep(torch.tensor(places, device=self._device))

    def _cached(self, model: Decoder, rows: Sequence[_Row]) -> Tensor:
        outgrown = [row for row in rows if len(row.ids) - row.begin > self._max_context]
        for row in outgrown:
            row.begin = len(row.ids) - max(1, self._max_context // 2)
        if self._past is None or outgrown:
            longest = max(len(row.window) for row in rows)
            padding = [longest - len(row.window) for row in rows]
            ids = [[_PADDING] * pads + row.window for pads, row in zip(padding, rows, strict=True)]
            padding_B = torch.tensor(padding, device=self._device) if any(padding) else None
            self._past = KVCache(len(model.blocks), padding_B)
            at_once = max(1, _MASK_PAIRS // (len(rows) * longest))
        else:
            ids, at_once = [row.ids[-1:] for row in rows], 1
        for part_BL in self._tensor(ids).split(at_once, dim=1):
            logits_B1V = model(part_BL, past=self._past, newest=True)
        return logits_B1V[:, 0]

    def _tensor(self, ids: list[list[int]]) -> Tensor:
        return torch.tensor(ids, device=self._device)
