"""Raw text -> documents -> token ids. Layer rule: a document's identity is the digest of its text, never its location."""

from springtide.corpus.benchmark import Quotes, quotes, quotes_of
from springtide.corpus.clean import check_clean, clean
from springtide.corpus.documents import Broken, Document
from springtide.corpus.infilling import Infilling, check_infilling, infill
from springtide.corpus.near_duplicates import (
    BANDS,
    BINS,
    SIMILAR,
    NearDuplicates,
    Signature,
    find_near_duplicates,
    jaccard,
    shingles,
    signature,
)
from springtide.corpus.pieces import Piece, without
from springtide.corpus.sources import CorpusReader, Unit, open_source
from springtide.corpus.tokenizer import Tokenizer, check_byte_counts, open_tokenizer

__all__ = [
    "BANDS",
    "BINS",
    "SIMILAR",
    "Broken",
    "CorpusReader",
    "Document",
    "Infilling",
    "NearDuplicates",
    "Piece",
    "Quotes",
    "Signature",
    "Tokenizer",
    "Unit",
    "check_byte_counts",
    "check_clean",
    "check_infilling",
    "clean",
    "find_near_duplicates",
    "infill",
    "jaccard",
    "open_source",
    "open_tokenizer",
    "quotes",
    "quotes_of",
    "shingles",
    "signature",
    "without",
]
