"""Convert the chats of a corpus to tokens by their chat templates, and check that packing does not cut a chat between rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from springtide.config.data import CorpusConfig, ShardsConfig
from springtide.corpus import BadChat, ChatTemplate, Document, read_template
from springtide.errors import ConfigError, CorpusError, explain

TOO_LONG = "chat longer than a row"
"""Reason to drop a chat, as reports show it. A row holds ``shards.sequence_length`` + 1 tokens."""
THOUGHTS_LEFT = "answers whose thoughts the template leaves out"
"""Key in ``edits`` (counts of changes to documents) for the number of answers whose reasoning (thoughts) was left out."""


def templates(corpus: CorpusConfig) -> dict[str, str]:
    """Return {name in ``corpus.chat_template``: text of the template} for all sources. Sources of plain texts have the entry
    {"": ""}. Raises ConfigError if a template does not exist or does not compile."""
    names = dict.fromkeys(each.chat_template for each in corpus.each().values())
    path, tokenizer = corpus.path, corpus.path(corpus.tokenizer)
    return {name: read_template(path(name), tokenizer) if name else "" for name in names}


def only_chats(texts: Mapping[str, str]) -> bool:
    """Return True if all documents of the dataset are chats. Then no document is cut between rows. ``texts``: result of
    ``templates``."""
    return bool(texts) and all(texts.values())


def check_chats(texts: Mapping[str, str], shards: ShardsConfig) -> None:
    """Raise ConfigError if ``shards.packing`` would cut chats between rows, or let tokens of a chat attend to another chat.
    ``texts``: result of ``templates``."""
    used = [name for name, text in texts.items() if text]
    if used and shards.packing != "best_fit":
        problem = f"cuts chats where a row is full, corpus.chat_template = {used[0]!r} needs them whole"
        remedy = "set shards.packing to best_fit and shards.mask_across_documents to true"
        raise ConfigError(explain("shards.packing", shards.packing, problem, remedy))


def laid_out(
    documents: Sequence[Document], template: ChatTemplate
) -> Iterator[tuple[np.ndarray, np.ndarray | None] | BadChat]:
    """Yield for each chat its token ids, ending with the end-of-document id, and a mask of the ids that are predicted. If the
    template cannot render a chat, yield a BadChat instead. A preference pair becomes one document, so that it stays in one row:
    the chosen chat, a begin-of-text id, and the rejected chat.

    Raises:
        CorpusError: the tokenizer cannot encode a text.
    """
    at, together = 0, len(documents)
    while at < len(documents):
        is_bad = False
        for found in _together(documents[at : at + together], template):
            yield found
            at += 1
            is_bad = isinstance(found, BadChat)
        # a bad chat ends its batch early: continue with the next chat alone, then with batches of 2, 4, 8 chats
        together = 1 if is_bad else 2 * together


def _together(
    documents: Sequence[Document], template: ChatTemplate
) -> Iterator[tuple[np.ndarray, np.ndarray | None] | BadChat]:
    """Yield the ids and mask of each chat, like ``laid_out``, but stop after yielding the first BadChat."""
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
    """Raise CorpusError if a dataset mixes preference pairs with other documents. ``counts``: counts of each unit (a few source
    files), from ``read_counts``; ``source``: for the error."""
    pairs, kept = sum(unit["pairs"] for unit in counts), sum(unit["documents"]["kept"] for unit in counts)
    if 0 < pairs < kept:
        problem = f"holds {pairs} pairs of answers and {kept - pairs} other documents"
        raise CorpusError(explain("corpus.source", source, problem, "prepare two datasets"))


def too_long(tokens: np.ndarray, shards: ShardsConfig) -> str:
    """Return the reason to drop a chat if it and its begin-of-text id do not fit a row, else "". Chats are not cut, because a
    cut chat would have answers without their questions."""
    return TOO_LONG if len(tokens) > shards.sequence_length else ""
