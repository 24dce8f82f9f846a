"""Requests that differ, answered in one batch: each has its own length, sampling, stop strings and ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from springtide.generation.growing_text import GrowingText
from springtide.generation.sampling import Sampling
from springtide.generation.text_model import TextModel
from springtide.generation.writer import write


@dataclasses.dataclass(frozen=True)
class TextRequest:
    """A text to write."""

    prompt: tuple[int, ...]
    """Ids that the model continues."""
    tokens: int
    """Most tokens to write."""
    sampling: Sampling
    ends: frozenset[int]
    """Ids that end the text."""
    stop: tuple[str, ...] = ()
    """Strings that end it; they are not part of it."""
    streams: bool = False
    """Show it while it is written."""


class Part(NamedTuple):
    """What was added to the text of a request."""

    text: str
    num_tokens: int
    """Tokens of the whole text so far."""
    ended: str = ""
    """Why the text has ended, as ``Answer.ended``; empty while it grows."""


def answer(
    model: TextModel,
    requests: Sequence[TextRequest],
    listen: Callable[[int, Part], None],
    is_wanted: Callable[[int], bool] = lambda row: True,
) -> None:
    """Write the text of each request, in one batch. A text depends on no other request, but for rounding.

    Args:
        model: that writes.
        requests: of any kinds.
        listen: called with the number of the request and each part of its text; without ``streams`` there is one part.
        is_wanted: returns False if nobody waits for the text of a request any more: it leaves the batch without a last part.

    Raises:
        CheckpointError: the model's logits are not numbers.

    Examples:
        >>> from springtide.generation import Sampling
        >>> from springtide.generation.requests import TextRequest, answer
        >>> from springtide.run.text import open_text
        >>> model = open_text("runs/mine")
        >>> short, long = (
        ...     TextRequest(tuple(model.prompt_ids(text)), tokens, Sampling(0), frozenset())
        ...     for text, tokens in (("import ", 2), ("def ", 4))
        ... )
        >>> answer(model, [short, long], lambda row, part: print(row, part.num_tokens, part.ended))
        0 2 length
        1 4 length
    """
    rows = [_Row(model, number, one, listen) for number, one in enumerate(requests)]
    write(
        model.model,
        [one.prompt for one in requests],
        [one.tokens for one in requests],
        max_context=model.max_length,
        vocab_size=model.vocab_size,
        sampling=[one.sampling for one in requests],
        listen=lambda row, drawn: not is_wanted(row) or rows[row].add(drawn),
    )


class _Row:
    """A request whose text grows."""

    def __init__(
        self, model: TextModel, number: int, request: TextRequest, listen: Callable[[int, Part], None]
    ) -> None:
        self._number, self._request, self._listen = number, request, listen
        self._new: list[str] = []
        on_text = self._new.append if request.streams else None
        self._text = GrowingText(model.vocabulary, request.prompt, request.stop, on_text)

    def add(self, drawn: int) -> bool:
        """Add an id; return whether the text has ended."""
        text = self._text
        ends = drawn in self._request.ends
        ended = ends or text.add(drawn) or len(text.ids) >= self._request.tokens
        if ended:
            text.finish()
        shown = "".join(self._new) if self._request.streams else text.text if ended else ""
        self._new.clear()
        if shown or ended:
            reason = ("end" if ends else text.ended(self._request.tokens)) if ended else ""
            self._listen(self._number, Part(shown, len(text.ids), reason))
        return ended
