"""Chats of a corpus: read their templates, lay them out as tokens, and check that packing keeps them whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from springtide.config.data import CorpusConfig, ShardsConfig
from springtide.corpus import BadChat, ChatTemplate, Document, read_template
from springtide.errors import ConfigError, CorpusError, explain

TOO_LONG = "chat longer than a row"
"""Reason under which a chat is counted as dropped."""
THOUGHTS_LEFT = "answers whose thoughts the template leaves out"
"""Name of this count in ``edits``, a unit's counts of changes to documents."""


def templates(corpus: CorpusConfig) -> dict[str, str]:
    """Return the text of each chat template by its name in ``corpus.chat_template``. A source of plain texts has the empty name
    and an empty text. ConfigError if a template cannot be used."""
    names = dict.fromkeys(each.chat_template for each in corpus.each().values())
    path, tokenizer = corpus.path, corpus.path(corpus.tokenizer)
    return {name: read_template(path(name), tokenizer) if name else "" for name in names}


def only_chats(texts: Mapping[str, str]) -> bool:
    """Return True if all documents are chats, so that no document is cut. ``texts``: result of ``templates``."""
    return bool(texts) and all(texts.values())


def check_chats(texts: Mapping[str, str], shards: ShardsConfig) -> None:
    """Raise ConfigError if packing would cut chats or let one attend to another. ``texts``: result of ``templates``."""
    used = [name for name, text in texts.items() if text]
    if used and shards.packing != "best_fit":
        problem = f"cuts chats where a row is full, corpus.chat_template = {used[0]!r} needs them whole"
        remedy = "set shards.packing to best_fit and shards.mask_across_documents to true"
        raise ConfigError(explain("shards.packing", shards.packing, problem, remedy))


def laid_out(
    documents: Sequence[Document], template: ChatTemplate
) -> Iterator[tuple[np.ndarray, np.ndarray | None] | BadChat]:
    """Yield the ids of each chat, the end-of-document id appended, and which of them are predicted. If the template cannot lay
    out a chat, yield a BadChat in its place. A preference pair is one document, so that it stays in one row: the chosen chat,
    a begin-of-text, and the rejected chat.

    Raises:
        CorpusError: the tokenizer cannot split a text.
    """
    at, together = 0, len(documents)
    while at < len(documents):
        is_bad = False
        for found in _together(documents[at : at + together], template):
            yield found
            at += 1
            is_bad = isinstance(found, BadChat)
        # after a bad chat the rest of its batch is laid out again, in batches that double from one chat on
        together = 1 if is_bad else 2 * together


def _together(
    documents: Sequence[Document], template: ChatTemplate
) -> Iterator[tuple[np.ndarray, np.ndarray | None] | BadChat]:
    """Yield like ``laid_out``, but stop after the first bad chat."""
    chats = [turns for document in documents for turns in (document.turns, document.rejected) if turns]
    laid, done = template.lay_out(chats), 0
    try:
        for document in documents:
            ids, is_predicted = next(laid)
            if document.rejected:
                assert template.begin_of_text is not None, "documents of chats are masked from each other"
                others, of_others = next(laid)
                ids = np.concatenate([ids, np.array([template.begin_of_text], ids.dtype), others])
                is_predicted = np.concatenate([is_predicted, [False], of_others])
            yield ids, is_predicted
            done += 1
    except BadChat as error:
        yield error
    except CorpusError as error:
        raise CorpusError(f"{documents[done].name}: {error}") from None


def check_pairs(counts: Sequence[Mapping[str, Any]], source: str) -> None:
    """Raise CorpusError if a dataset mixes preference pairs with other documents. ``counts``: one entry per unit."""
    pairs, kept = sum(unit["pairs"] for unit in counts), sum(unit["documents"]["kept"] for unit in counts)
    if 0 < pairs < kept:
        problem = f"holds {pairs} pairs of answers and {kept - pairs} other documents"
        raise CorpusError(explain("corpus.source", source, problem, "prepare a dataset of each"))


def too_long(tokens: np.ndarray, shards: ShardsConfig) -> str:
    """Return the reason to drop a chat that does not fit a row with its begin-of-text, empty for a chat that fits. A cut chat
    would hold answers without their questions."""
    return TOO_LONG if len(tokens) > shards.sequence_length else ""
