"""The list of planted bugs names tests that are still there."""

from __future__ import annotations

from planted import DEFECTS, ROOT, UNIT


def test_the_test_that_finds_each_bug_is_there() -> None:
    """``python planted.py --check`` in tests/programs runs them."""
    lost = []
    for name, defect in DEFECTS.items():
        file, _, test = defect.found_by.partition("::")
        path = ROOT / UNIT / file
        if not path.exists() or f"def {test}(" not in path.read_text():
            lost.append(f"{name}: {defect.found_by}")
    assert len(DEFECTS) == 20
    assert not lost
