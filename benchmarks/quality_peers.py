"""datatrove's verdicts for ``quality.py``, in an interpreter of its own: python quality_peers.py TEXTS.json

Prints one line of JSON: for each rule set, why each text is dropped (empty if it is kept), its text after it, and CPU seconds.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.filters import C4QualityFilter, GopherQualityFilter, GopherRepetitionFilter

FILTERS = {"gopher": (GopherQualityFilter(), GopherRepetitionFilter()), "c4": (C4QualityFilter(),)}


def main() -> None:
    corpus = json.loads(Path(sys.argv[1]).read_text())
    found: dict[str, Any] = {}
    for name, filters in FILTERS.items():
        filters[0].filter(Document(corpus[0], "0"))  # loads the language
        began = time.process_time()
        reasons, texts = [], []
        for text in corpus:
            document, reason = Document(text, "0"), ""
            for rule in filters:
                verdict = rule.filter(document)
                if verdict is not True:
                    reason = str(verdict[1])
                    break
            reasons.append(reason)
            texts.append("" if reason else document.text)
        found[name] = {"reasons": reasons, "texts": texts, "cpu_s": time.process_time() - began}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
