"""The text of a row while it is written: its stop strings, and the parts of it that can be shown already."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from springtide.corpus import Tokenizer

_TAIL = 8
"""Ids of the prompt that are decoded with what follows: some tokenizers drop the space before the first id."""
_CUT = "\ufffd"
"""What the bytes of a character spell that is not complete."""


class GrowingText:
    """The text after a prompt."""

    def __init__(
        self,
        vocabulary: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
    ) -> None:
        """``stop``: strings that end it; ``on_text``: called with each new part of it."""
        self._vocabulary, self._tail = vocabulary, list(prompt[-_TAIL:])
        self._before = vocabulary.decode(self._tail)
        self._stop, self._on_text = [one for one in stop if one], on_text
        self._shown = 0
        self._stopped = False
        self.ids: list[int] = []
        self.text = ""

    def add(self, drawn: int) -> bool:
        """Add an id; return whether a stop string ends the text."""
        self.ids.append(drawn)
        if self._stop or self._on_text:
            self._read()
            self._show(len(self.text) if self._stopped else len(self.text) - self._open_end())
        return self._stopped

    def finish(self) -> None:
        """Show the rest: nothing follows."""
        if not self._stopped:
            self._read()
        self._show(len(self.text))

    def ended(self, tokens: int) -> str:
        """Return why it ended, as ``Answer.ended``; ``tokens``: the most it may have."""
        if self._stopped:
            return "stop"
        return "length" if len(self.ids) >= tokens else "end"

    def _read(self) -> None:
        whole = self._vocabulary.decode([*self._tail, *self.ids])
        fits = whole.startswith(self._before)
        text = whole[len(self._before) :] if fits else self._vocabulary.decode(self.ids)
        places = [place for one in self._stop if (place := text.find(one)) >= 0]
        self._stopped = bool(places)
        self.text = text[: min(places)] if places else text

    def _open_end(self) -> int:
        """Return the number of characters at the end that may still change or begin a stop string."""
        cut = len(self.text) - len(self.text.rstrip(_CUT))
        begun = [size for one in self._stop for size in range(1, len(one)) if self.text.endswith(one[:size])]
        return max([cut, *begun])

    def _show(self, upto: int) -> None:
        if self._on_text and upto > self._shown:
            self._on_text(self.text[self._shown : upto])
            self._shown = upto
