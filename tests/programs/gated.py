"""``springtide.training`` whose steps a test lets pass: ``torchrun gated.py GATE --config FILE``. A rank gets the batch of a
step once the file GATE holds its number, or a larger one; GATE.waits has the number of a step that waits."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from springtide.stream import Batch
from springtide.training import __main__ as program

_LOOK_S = 0.01


def gated(gate: Path, batches: Iterator[Batch]) -> Iterator[Batch]:
    """The batches, each once its step is let pass."""
    for batch in batches:
        while int(gate.read_text()) <= batch.step:  # steps done before it
            gate.with_suffix(".waits").write_text(str(batch.step + 1))
            time.sleep(_LOOK_S)  # between looks at the file
        yield batch


def main() -> None:
    """Train."""
    gate = Path(sys.argv.pop(1))
    load = program.load

    def load_gated(*arguments: Any) -> Iterator[Batch]:
        return gated(gate, load(*arguments))

    program.load = load_gated
    program.main()


if __name__ == "__main__":
    main()
