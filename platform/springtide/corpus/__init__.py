"""Raw text -> documents -> token ids. Law: a document is known by the digest of its text, never by where it lies."""

from springtide.corpus.clean import clean
from springtide.corpus.near import BANDS, bands, clusters
from springtide.corpus.sources import Broken, Document, Source, Unit, open_source
from springtide.corpus.vocabulary import Vocabulary, check_byte_counts, open_vocabulary

__all__ = [
    "BANDS",
    "Broken",
    "Document",
    "Source",
    "Unit",
    "Vocabulary",
    "bands",
    "check_byte_counts",
    "clean",
    "clusters",
    "open_source",
    "open_vocabulary",
]
