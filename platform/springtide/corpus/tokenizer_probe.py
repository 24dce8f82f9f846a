"""Check an untrusted tokenizer.json before it is used: the library ``tokenizers`` aborts its process when memory runs out.

``probe`` runs this file as a separate process with limits of memory and CPU time. The process loads the tokenizer and encodes a
few texts.
"""

from __future__ import annotations

import base64
import hashlib
import json
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

_TEXTS = (
    "a",
    "A quick brown fox: 12,345 jumps!\n\n\tfor x in range(10):",
    " " * 300,
    "\u00e9t\u00e9 \u6f22\u5b57 \u0627\u0644 \U0001f30a",
)
MOST_BYTES, MOST_VALUES = 64 * 2**20, 2**22
"""Maximum size [bytes] and number of JSON values of a tokenizer.json. Gemma 3's file has 33 MB and 2 million values."""
_BYTES = 2 * 2**30
_BYTES_PER_BYTE = 32
"""The memory limit is ``_BYTES`` (2 GiB) plus this number of bytes for each byte of the file. Loading needs about 20."""
_SECONDS = 60
"""Limit of CPU time [s]. A file of 33 MB loads in about 3 s."""
_MOST_GROWTH = 64
"""Largest factor by which a tokenizer may lengthen a text before its model, or in its decoder. Known tokenizers reach 36."""
_UNICODE_GROWTH = 18
"""Largest factor by which Unicode normalisation lengthens a text: NFKC, NFKD and SentencePiece's maps turn the one character
U+FDFA into 18 characters."""
_MOST_PARTS = 256
"""Maximum number of parts in one step of a tokenizer, such as its decoder. Each part reads the whole text, which takes time."""
_BETWEEN = {"CTC": "word_delimiter_token", "BPEDecoder": "suffix"}
"""Type of decoder -> its field that holds a text; the decoder replaces each occurrence of the text by a space."""
_MOST_PREPENDED, _MOST_MAPPED_BYTES, _MOST_TOKEN, _MOST_WORD, _MOST_SIZE = 64, 64, 2**16, 1000, 2**24
"""Limits of a tokenizer, in this order: characters that it adds before a text or to a word; bytes of a replacement in a
SentencePiece map; characters of a token; characters of a word in a WordPiece model (time grows with the cube of this length) or
of a token in a Unigram model (time grows in proportion to this length); number of ids."""


_known: set[bytes] = set()
"""Hashes of tokenizer.json texts that need no check: this process has checked them, or wrote them from a loaded tokenizer."""


def mark_probed(text: str) -> None:
    """Record that ``text``, a tokenizer.json, is safe to load, so that ``probe`` does not check it again."""
    _known.add(_digest(text))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()


def probe(text: str, name: str) -> None:
    """Check a tokenizer.json: load it in a separate process with limits, and encode a few texts.

    A tokenizer.json that this process has checked before is not checked again.

    Args:
        text: content of the file.
        name: name of the file, for the error.

    Raises:
        CorpusError: the separate process failed, ran out of memory or took too long.
    """
    if _digest(text) in _known:
        return
    # imported here, because this file also runs as a program that cannot import springtide
    from springtide.corpus.chat_sandbox import child_environment, folders_of
    from springtide.errors import CorpusError, explain

    done = subprocess.run(
        [sys.executable, "-I", __file__, *folders_of("tokenizers")],
        input=text.encode("utf-8", "replace"),
        capture_output=True,
        check=False,
        env=child_environment(),
        start_new_session=True,  # Ctrl-C in the terminal must end only the parent
    )
    if not done.returncode:
        mark_probed(text)
        return
    said = (done.stderr.decode("utf-8", "replace").strip() or "no message").splitlines()[-1][:300]
    limit = f"is not a tokenizer that can be used ({said})"
    if done.returncode < 0 or "MemoryError" in said:
        ended = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
        limit = f"cannot be used: a process that loaded it and encoded a few texts ended with {ended} ({said})"
    raise CorpusError(explain("corpus.tokenizer", name, limit, "give another tokenizer.json"))


def checked_text(data: bytes, name: str) -> str:
    """Return the text of an untrusted tokenizer.json, after checking its size and probing it.

    Args:
        data: content of the file.
        name: name of the file, for the error.

    Raises:
        CorpusError: the file is too large, or ``probe`` refuses it.
    """
    from springtide.errors import CorpusError, explain
    from springtide.storage import most_values

    remedy = "the file is damaged or hostile: give another tokenizer.json"
    if len(data) > MOST_BYTES:
        limit = f"has {len(data):,} bytes, and {MOST_BYTES:,} is the limit"
        raise CorpusError(explain("corpus.tokenizer", name, limit, remedy))
    if (values := most_values(data)) > MOST_VALUES:
        limit = f"has {values:,} values of JSON, and {MOST_VALUES:,} is the limit"
        raise CorpusError(explain("corpus.tokenizer", name, limit, remedy))
    text = data.decode("utf-8", "replace")
    probe(text, name)
    return text


def check_bounds(found: Any) -> None:
    """Check that a tokenizer cannot make a text more than 64 times as long, cannot take very long to process a text, and is
    deterministic.

    Args:
        found: a ``tokenizers.Tokenizer``.

    Raises:
        CorpusError: the tokenizer exceeds a limit, or drops merges at random (BPE dropout).
    """
    growth = 1.0
    for step in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        part = getattr(found, step)
        parts = [*parts_of(json.loads(part.__getstate__()) if part is not None else None)]
        if len(parts) > _MOST_PARTS:
            raise _refused(f"its {step} has {len(parts):,} parts, and {_MOST_PARTS} is the limit")
        # encoding applies the first three steps in sequence, so their factors multiply; decoding applies only the decoder
        growth = _growth(step, parts) * (1.0 if step == "decoder" else growth)
        if growth > _MOST_GROWTH:
            raise _refused(f"its {step} may make a text {growth:,.0f} times as long, and {_MOST_GROWTH} is the limit")
    for affix in ("continuing_subword_prefix", "end_of_word_suffix"):
        if (length := len(getattr(found.model, affix, None) or "")) > _MOST_PREPENDED:
            raise _refused(f"has a {affix} of {length:,} characters, and {_MOST_PREPENDED} is the limit")
    tokens = found.get_vocab(with_added_tokens=True)
    most = _MOST_WORD if type(found.model).__name__ == "Unigram" else _MOST_TOKEN
    if (longest := max(map(len, tokens), default=0)) > most:
        raise _refused(f"has a token of {longest:,} characters, and {most:,} is the limit")
    if (size := 1 + max(tokens.values(), default=0)) > _MOST_SIZE:
        raise _refused(f"has {size:,} ids, and {_MOST_SIZE:,} is the limit")
    if (word := getattr(found.model, "max_input_chars_per_word", 0)) > _MOST_WORD:
        raise _refused(f"has max_input_chars_per_word = {word:,}, and {_MOST_WORD:,} is the limit")
    if getattr(found.model, "dropout", None):
        raise _refused("drops merges at random (dropout), so a text would have other ids each time")


def _growth(step: str, parts: Sequence[dict[str, Any]]) -> float:
    """Return the largest factor by which one step of a tokenizer, such as its decoder, may lengthen a text. ``parts``: the
    parts of the step, which are applied one after another."""
    growth, unicode, prepended, byte_levels = 1.0, 1.0, 0, 0
    for part in parts:
        kind = part.get("type")
        if kind == "Replace":
            pattern, content = part["pattern"], len(part["content"])
            # worst case of a regular expression: it matches between any two characters and inserts the content there
            growth *= max(1.0, content / max(1, len(pattern["String"])) if "String" in pattern else 1 + content)
        elif kind == "Prepend":
            prepended += len(part["prepend"])
        elif kind == "ByteLevel" and step in ("normalizer", "pre_tokenizer"):
            byte_levels += 1
        elif kind == "BertNormalizer" and part["handle_chinese_chars"]:
            growth *= 3  # adds a space before and after each Chinese character
        elif kind in _BETWEEN and not part[_BETWEEN[kind]]:
            growth *= 3  # an empty text matches before and after each character, and becomes a space
        elif kind == "WordPiece" and step == "decoder":
            growth *= 2  # adds a space before each token
        elif kind == "TemplateProcessing":
            growth *= max(1, sum("Sequence" in piece for piece in part["single"]))
        elif kind == "Precompiled" and (longest := _longest_mapped(part["precompiled_charsmap"])) > _MOST_MAPPED_BYTES:
            raise _refused(f"its {step} maps characters to {longest:,} bytes, and {_MOST_MAPPED_BYTES} is the limit")
        if kind in ("NFKC", "NFKD", "Precompiled"):
            unicode = _UNICODE_GROWTH  # not multiplied: a second normalisation changes nothing
    if prepended > _MOST_PREPENDED:
        raise _refused(f"its {step} puts {prepended:,} characters before a text, and {_MOST_PREPENDED} is the limit")
    # a first ByteLevel turns a character into up to four letters; each further ByteLevel turns a non-ASCII letter into two
    return growth * unicode * (4 * 2.0 ** (byte_levels - 1) if byte_levels > 1 else 1.0)


def _longest_mapped(charsmap: str | None) -> int:
    """Return the length of the longest replacement text in a SentencePiece map [bytes]. The map is, in base64: four bytes with
    the size of a trie, the trie, then the replacement texts, each ended by a zero byte (Kudo, SentencePiece,
    ``normalizer.cc``)."""
    data = base64.b64decode(charsmap or "")
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max(map(len, texts.split(b"\0")), default=0)


def _refused(limit: str) -> Exception:
    from springtide.errors import CorpusError, explain

    return CorpusError(explain("corpus.tokenizer", "(file)", limit, "use another tokenizer.json"))


def parts_of(step: Any) -> Iterator[dict[str, Any]]:
    """Yield each step in one part of a ``tokenizer.json``, such as its decoder. Steps inside a ``Sequence`` are included."""
    if isinstance(step, dict):
        if "type" in step:
            yield step
        for key in ("normalizers", "pretokenizers", "decoders", "processors"):
            for part in step.get(key, ()):
                yield from parts_of(part)


def main() -> None:
    """Read a tokenizer.json from standard input. Encode and decode a few texts with it, under limits of memory and CPU time."""
    sys.path += sys.argv[1:]
    import tokenizers

    text = sys.stdin.buffer.read()
    most = _BYTES + _BYTES_PER_BYTE * len(text)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    found = tokenizers.Tokenizer.from_str(text.decode("utf-8", "replace"))
    found.encode_special_tokens = True
    found.no_truncation()
    found.no_padding()
    for one in found.encode_batch_fast(list(_TEXTS), add_special_tokens=False):
        found.decode(one.ids, skip_special_tokens=True)


if __name__ == "__main__":
    main()
