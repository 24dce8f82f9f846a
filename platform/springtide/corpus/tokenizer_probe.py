"""Check a tokenizer.json of a stranger before it is used: the library ends the process that it runs in where memory runs out.

``probe`` runs this file as a process of its own, with limits, which loads the tokenizer and uses it once.
"""

from __future__ import annotations

import base64
import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

_TEXTS = (
    "a",
    "A quick brown fox: 12,345 jumps!\n\n\tfor x in range(10):",
    " " * 300,
    "\u00e9t\u00e9 \u6f22\u5b57 \u0627\u0644 \U0001f30a",
)
_BYTES = 2 * 2**30
_BYTES_PER_BYTE = 32
"""Memory for each byte of the file: loading takes about 20."""
_SECONDS = 60
"""CPU time: a file of 33 MB loads in about 3 s."""
_MOST_GROWTH = 64
"""How many times as long the normalizer or the decoder may make a text. Known tokenizers reach 36."""
_UNICODE_GROWTH = 18
"""NFKC and NFKD make 18 characters of U+FDFA; SentencePiece's maps have the same."""
_MOST_PREPENDED, _MOST_MAPPED_BYTES, _MOST_TOKEN, _MOST_WORD, _MOST_SIZE = 64, 64, 2**16, 1000, 2**24
"""Most characters that are put before a text, bytes that a map puts in place of a few, characters of a token, of a word of
WordPiece (whose time grows with its cube) or of a token of Unigram (whose time grows with it), and ids."""


def probe(text: str, name: str) -> None:
    """Load a tokenizer.json in a process of its own, and encode a few texts with it.

    Args:
        text: content of the file.
        name: of the file, for the error.

    Raises:
        CorpusError: that process was ended, because memory ran out or it took too long.
    """
    # not as the program: its path has no springtide
    from springtide.corpus.chat_sandbox import child_environment, folders_of
    from springtide.errors import CorpusError, explain

    done = subprocess.run(
        [sys.executable, "-I", __file__, *folders_of("tokenizers")],
        input=text.encode("utf-8", "replace"),
        capture_output=True,
        check=False,
        env=child_environment(),
        start_new_session=True,  # Ctrl-C at the terminal is for the parent
    )
    if not done.returncode:
        return
    said = (done.stderr.decode("utf-8", "replace").strip() or "no message").splitlines()[-1][:300]
    limit = f"is not a tokenizer that can be used ({said})"
    if done.returncode < 0 or "MemoryError" in said:
        ended = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
        limit = f"cannot be used: a process that loaded it and encoded a few texts ended with {ended} ({said})"
    raise CorpusError(explain("corpus.tokenizer", name, limit, "give another tokenizer.json"))


def check_bounds(found: Any) -> None:
    """Check that a tokenizer cannot make a text much longer, or take very long for it.

    Args:
        found: a ``tokenizers.Tokenizer``.

    Raises:
        CorpusError: it may.
    """
    for step in ("normalizer", "decoder"):
        part = getattr(found, step)
        state = json.loads(part.__getstate__()) if part is not None else None
        if (growth := _growth(step, state)) > _MOST_GROWTH:
            raise _refused(f"its {step} may make a text {growth:,.0f} times as long, and {_MOST_GROWTH} is the limit")
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


def _growth(step: str, state: Any) -> float:
    """Return the most that the parts of a step may multiply the length of a text by."""
    growth = unicode = 1.0
    for part in parts_of(state):
        kind = part.get("type")
        if kind == "Replace":
            pattern, content = part["pattern"], len(part["content"])
            # a regular expression may match the empty text between any two characters
            growth *= max(1.0, content / max(1, len(pattern["String"])) if "String" in pattern else 1 + content)
        elif kind == "Prepend" and len(part["prepend"]) > _MOST_PREPENDED:
            raise _refused(f"its {step} puts {len(part['prepend']):,} characters before a text")
        elif kind == "Precompiled" and (longest := _longest_mapped(part["precompiled_charsmap"])) > _MOST_MAPPED_BYTES:
            raise _refused(f"its {step} maps characters to {longest:,} bytes, and {_MOST_MAPPED_BYTES} is the limit")
        if kind in ("NFKC", "NFKD", "Precompiled"):
            unicode = _UNICODE_GROWTH  # once: the second one finds nothing to do
    return growth * unicode


def _longest_mapped(charsmap: str | None) -> int:
    """Return the length of the longest text in a map of SentencePiece. Layout: four bytes with the size of a trie, the trie,
    texts that end with a zero byte (Kudo, SentencePiece, ``normalizer.cc``)."""
    data = base64.b64decode(charsmap or "")
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max(map(len, texts.split(b"\0")), default=0)


def _refused(limit: str) -> Exception:
    from springtide.errors import CorpusError, explain

    return CorpusError(explain("corpus.tokenizer", "(file)", limit, "use another tokenizer.json"))


def parts_of(step: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps in a part of a ``tokenizer.json``, those inside sequences included."""
    if isinstance(step, dict):
        if "type" in step:
            yield step
        for key in ("normalizers", "pretokenizers", "decoders"):
            for part in step.get(key, ()):
                yield from parts_of(part)


def main() -> None:
    """Read the file from standard input, encode and decode a few texts."""
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
