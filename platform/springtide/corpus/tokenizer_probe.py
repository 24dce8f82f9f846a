"""Check a tokenizer.json of a stranger before it is used: the library ends the process that it runs in where memory runs out.

``probe`` runs this file as a process of its own, with limits, which loads the tokenizer and uses it once.
"""

from __future__ import annotations

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
_MOST_GROWTH = 16
"""How many times as long the replacements of a tokenizer may make a text. Known tokenizers reach 4."""


def probe(text: str, name: str) -> None:
    """Load a tokenizer.json in a process of its own, and encode a few texts with it.

    Args:
        text: content of the file.
        name: of the file, for the error.

    Raises:
        CorpusError: that process was ended, because memory ran out or it took too long.
    """
    from springtide.errors import CorpusError, explain  # not as the program: its path has no springtide

    done = subprocess.run(
        [sys.executable, "-I", __file__],
        input=text.encode("utf-8", "replace"),
        capture_output=True,
        check=False,
        env={},
        start_new_session=True,  # Ctrl-C at the terminal is for the parent
    )
    said = (done.stderr.decode("utf-8", "replace").strip() or "no message").splitlines()[-1][:300]
    # an exception of the library is for the caller to find: its message says more
    if done.returncode < 0 or "MemoryError" in said:
        ended = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
        limit = f"cannot be used: a process that loaded it and encoded a few texts ended with {ended} ({said})"
        raise CorpusError(explain("corpus.tokenizer", name, limit, "use another tokenizer.json"))


def check_growth(step: str, found: Any) -> None:
    """Check that the replacements of a tokenizer cannot make a text much longer.

    Args:
        step: ``normalizer`` or ``decoder``.
        found: the tokenizer's object of it; None if it has none.

    Raises:
        CorpusError: they can.
    """
    from springtide.errors import CorpusError, explain

    growth = 1.0
    for part in parts_of(json.loads(found.__getstate__()) if found is not None else None):
        if part.get("type") == "Replace":
            pattern, content = part["pattern"], len(part["content"])
            # a regular expression may match the empty text between any two characters
            growth *= max(1.0, content / max(1, len(pattern["String"])) if "String" in pattern else 1 + content)
    if growth > _MOST_GROWTH:
        limit = f"its {step} may make a text {growth:,.0f} times as long, and {_MOST_GROWTH} is the limit"
        raise CorpusError(explain("corpus.tokenizer", "(file)", limit, "use another tokenizer.json"))


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
