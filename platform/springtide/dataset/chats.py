"""Chats of a corpus: their templates, their tokens, and how rows must be packed for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from springtide.config.data import CorpusConfig, ShardsConfig
from springtide.corpus import BadChat, ChatTemplate, CorpusReader, Document, read_template
from springtide.errors import ConfigError, explain


def templates(corpus: CorpusConfig) -> dict[str, str]:
    """Return the text of each template by its name in ``corpus.chat_template``; empty for that of texts. ConfigError if one
    cannot be used."""
    names = dict.fromkeys(each.chat_template for each in corpus.each().values())
    return {name: read_template(name) if name else "" for name in names}


def check_chats(texts: Mapping[str, str], shards: ShardsConfig) -> None:
    """Raise ConfigError if the rows would cut chats or let one attend to another. ``texts``: as from ``templates``."""
    used = [name for name, text in texts.items() if text]
    if used and shards.packing != "best_fit":
        problem = f"cuts chats where a row is full, corpus.chat_template = {used[0]!r} needs them whole"
        remedy = "set shards.packing to best_fit and shards.mask_across_documents to true"
        raise ConfigError(explain("shards.packing", shards.packing, problem, remedy))


def laid_out(
    documents: Sequence[Document], template: ChatTemplate, source: CorpusReader
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Yield the ids of each chat, the end-of-document id appended, and which of them are predicted.

    Raises:
        CorpusError: the template cannot lay out a chat, which is named with its file and line.
    """
    done = 0
    try:
        for found in template.lay_out([document.turns for document in documents]):
            yield found
            done += 1
    except BadChat as error:
        raise source.blamed(documents[done].name, error) from None


def too_long(tokens: np.ndarray, shards: ShardsConfig) -> str:
    """Return why a chat is dropped that does not fit a row after its begin-of-text: cut, it would hold answers to nothing."""
    return "chat longer than a row" if len(tokens) > shards.sequence_length else ""
