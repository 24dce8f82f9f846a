"""The text of a row while it is written: its stop strings, and the parts of it that can be shown already."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from springtide.corpus import Tokenizer

_TAIL = 8
"""Ids of the prompt that are decoded with what follows: some tokenizers drop the space before the first id."""
_CUT = "\ufffd"
"""What the bytes of a character spell that is not complete."""
_SETTLE_AT, _MOST_OPEN = 32, 256
"""Ids that are decoded again with each new one, before their text is taken as final; and where it spells no characters."""
_MOST_BYTES = 4
"""Bytes of the longest character: of as many ids in a row one begins a character."""


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
        self._vocabulary, self._prompt = vocabulary, list(prompt[-_TAIL:])
        self._stop, self._on_text = [one for one in stop if one], on_text
        self._shown = 0
        self._stopped = False
        self._settle(0, "", self._prompt, vocabulary.decode(self._prompt))
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
        text = self._whole()
        begin = max(0, len(self._settled) - max(map(len, self._stop), default=0))  # what is before was searched
        places = [place for one in self._stop if (place := text.find(one, begin)) >= 0]
        self._stopped = bool(places)
        self.text = text[: min(places)] if places else text
        if not places and len(self.ids) >= self._num_settled + _SETTLE_AT:
            self._settle_all(text)

    def _settle_all(self, text: str) -> None:
        """Take ``text``, that of all ids, as final, if it does not end within a character."""
        number = len(self.ids)
        if number >= self._num_settled + _MOST_OPEN and text.endswith(_CUT):
            number -= _TAIL  # bytes that are no text: what these spell depends on no next one
        for size in range(_TAIL, _TAIL + _MOST_BYTES):
            tail = self.ids[number - size : number]
            before, after = (self._vocabulary.decode(ids) for ids in (tail, [*tail, *self.ids[number:]]))
            until = len(text) - len(after) + len(before)
            is_open = number == len(self.ids) and before.endswith(_CUT)
            if (
                before
                and after.startswith(before)
                and text[:until].endswith(before)
                and text.endswith(after)
                and not is_open
            ):
                self._settle(number, text[:until], tail, before)
                break

    def _whole(self) -> str:
        """Return the text of all ids; those that follow the settled ones are decoded."""
        whole = self._vocabulary.decode([*self._tail, *self.ids[self._num_settled :]])
        if whole.startswith(self._before):
            return self._settled + whole[len(self._before) :]
        if not self._num_settled:
            return self._vocabulary.decode(self.ids)
        self._settle(0, "", self._prompt, self._vocabulary.decode(self._prompt))  # an id changed what is before it
        return self._whole()

    def _settle(self, number: int, text: str, tail: list[int], before: str) -> None:
        """Take ``text`` as that of the first ``number`` ids; next ones are decoded after ``tail``, which spells ``before``."""
        self._num_settled, self._settled, self._tail, self._before = number, text, tail, before

    def _open_end(self) -> int:
        """Return the number of characters at the end that may still change or begin a stop string."""
        cut = len(self.text) - len(self.text.rstrip(_CUT))
        begun = [size for one in self._stop for size in range(1, len(one)) if self.text.endswith(one[:size])]
        return max([cut, *begun])

    def _show(self, upto: int) -> None:
        if self._on_text and upto > self._shown:
            self._on_text(self.text[self._shown : upto])
            self._shown = upto
