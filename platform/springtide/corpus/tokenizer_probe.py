"""Load a tokenizer.json and use it once. ``tokenizer.probe`` runs this file as a process of its own with limits, because the
library ends the process that it runs in where memory runs out, and loads files from anybody."""

from __future__ import annotations

import resource
import sys

_TEXTS = (
    "a",
    "A quick brown fox: 12,345 jumps!\n\n\tfor x in range(10):",
    " " * 300,
    "été 漢字 \u0627\u0644 \U0001f30a",
)
_BYTES = 2 * 2**30
_BYTES_PER_BYTE = 32
"""Memory for each byte of the file: loading takes about 20."""
_SECONDS = 60
"""CPU time: a file of 33 MB loads in about 3 s."""


def main() -> None:
    """Read the file from standard input, encode and decode a few texts, and print ok."""
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
    sys.stdout.write("ok")


if __name__ == "__main__":
    main()
