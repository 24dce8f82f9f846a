"""Turn raw text into documents and token ids. Rule of this package: a document is identified by the hash of its text, never by
its location."""

from springtide.corpus.chat_template import TEMPLATE_BYTES, ChatTemplate, read_template
from springtide.corpus.chats import BadChat
from springtide.corpus.cleaning import check_clean, clean, clean_turns
from springtide.corpus.documents import Broken, Document
from springtide.corpus.files import changed_files
from springtide.corpus.infilling import Infilling, check_pieces, infill
from springtide.corpus.near_duplicates import (
    BANDS,
    BINS,
    SIMILAR,
    NearDuplicates,
    Quotes,
    Signature,
    exact_signature,
    find_near_duplicates,
    jaccard,
    quotes,
    quotes_of,
    sharing,
    shingles,
    signature,
)
from springtide.corpus.pieces import Piece, without
from springtide.corpus.sources import CorpusReader, Unit, open_source
from springtide.corpus.tokenizer import UNSPLIT, Tokenizer, check_byte_counts, open_tokenizer, tokenizer_file
from springtide.corpus.tokenizer_probe import checked_text, probe

__all__ = [
    "BANDS",
    "BINS",
    "SIMILAR",
    "TEMPLATE_BYTES",
    "UNSPLIT",
    "BadChat",
    "Broken",
    "ChatTemplate",
    "CorpusReader",
    "Document",
    "Infilling",
    "NearDuplicates",
    "Piece",
    "Quotes",
    "Signature",
    "Tokenizer",
    "Unit",
    "changed_files",
    "check_byte_counts",
    "check_clean",
    "check_pieces",
    "checked_text",
    "clean",
    "clean_turns",
    "exact_signature",
    "find_near_duplicates",
    "infill",
    "jaccard",
    "open_source",
    "open_tokenizer",
    "probe",
    "quotes",
    "quotes_of",
    "read_template",
    "sharing",
    "shingles",
    "signature",
    "tokenizer_file",
    "without",
]
