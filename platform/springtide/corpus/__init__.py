"""Raw text -> documents -> token ids. Law: a document is known by the digest of its text, never by where it lies."""

from springtide.corpus.sources import Document, Source, open_source
from springtide.corpus.vocabulary import Vocabulary, open_vocabulary

__all__ = ["Document", "Source", "Vocabulary", "open_source", "open_vocabulary"]
