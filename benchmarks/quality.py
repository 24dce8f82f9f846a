"""The verdicts of ``corpus.quality`` and of datatrove's filters on the same texts, and what they differ in.

    python benchmarks/quality.py [--python .venv-peers/bin/python] [--show 3]

The texts are this interpreter's own: topics of Python's reference, docstrings of 400 characters and more of its library, and
descriptions of the installed packages. datatrove runs in an interpreter of its own (make .venv-peers), with its defaults.
"""

from __future__ import annotations

import argparse
import ast
import collections
import importlib.metadata
import json
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import claims

from springtide.corpus.cleaning import c4, gopher

PEERS = Path(__file__).with_name("quality_peers.py")
_LEAST_CHARACTERS = 400
_NODES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def texts() -> Iterator[str]:
    """The topics, docstrings and descriptions, each once."""
    yield from topics.values()
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted([*library.glob("*.py"), *library.glob("[a-z]*/*.py")]):
        if "test" in path.parts or "site-packages" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            found = ast.get_docstring(node) if isinstance(node, _NODES) else None
            if found and len(found) >= _LEAST_CHARACTERS:
                yield found
    for package in sorted(importlib.metadata.distributions(), key=lambda one: one.name):
        if len(found := str(package.metadata.get_payload() or "")) >= _LEAST_CHARACTERS:
            yield found


def counts_punctuation(text: str) -> bool:
    """Whether fewer than 80% of words have a letter if each punctuation mark is a word, as datatrove's tokenizer has it."""
    found = re.findall(r"\w+|[^\w\s]", text)
    return sum(any(map(str.isalpha, word)) for word in found) < 0.8 * len(found)


def compare(name: str, ours: list[str], theirs: list[str], corpus: list[str], show: int) -> None:
    """Print how often both keep, both drop and only one drops, and by which rules."""
    table = collections.Counter((bool(mine), bool(other)) for mine, other in zip(ours, theirs, strict=True))
    same = (table[True, True] + table[False, False]) / len(ours)
    print(
        f"{name}: both keep {table[False, False]}, both drop {table[True, True]}, "
        f"only ours drops {table[True, False]}, only datatrove drops {table[False, True]}; agree {same:.1%}"
    )
    for who, drops, others in (("ours", ours, theirs), ("datatrove", theirs, ours)):
        reasons = collections.Counter(
            drop for drop, other in zip(drops, others, strict=True) if drop and not other
        ).most_common()
        for reason, count in reasons:
            print(f"  only {who}: {count:4} {reason}")
            if reason == "gopher_below_alpha_threshold":
                mine = [
                    text
                    for text, drop, other in zip(corpus, drops, others, strict=True)
                    if drop == reason and not other
                ]
                print(f"    of these {sum(map(counts_punctuation, mine))} where each punctuation mark is a word")
        examples = [at for at, drop in enumerate(drops) if drop and not others[at]][:show]
        for at in examples:
            print(f"    {drops[at]}: {corpus[at][:300]!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=str(claims.PEERS_PYTHON), help="the interpreter with datatrove")
    parser.add_argument("--show", type=int, default=0, help="texts to print for each difference")
    options = parser.parse_args()
    if not Path(options.python).exists():
        sys.exit("no .venv-peers: there is nobody to compare with; `make .venv-peers` brings datatrove")
    corpus = list(dict.fromkeys(texts()))
    characters = sum(map(len, corpus))
    print(f"{len(corpus)} texts, {characters:,} characters")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "texts.json"
        file.write_text(json.dumps(corpus))
        done = subprocess.run([options.python, str(PEERS), str(file)], capture_output=True, text=True, check=True)
    theirs = json.loads(done.stdout.splitlines()[-1])
    for name, rule in (("gopher", gopher), ("c4", c4)):
        began = time.process_time()
        ours = [rule(text) for text in corpus]
        ours_s = time.process_time() - began
        compare(name, [one.reason for one in ours], theirs[name]["reasons"], corpus, options.show)
        print(
            f"  {characters / ours_s / 1e6:.1f} MB/s a core, datatrove {characters / theirs[name]['cpu_s'] / 1e6:.2f}"
        )
        if name == "c4":
            both = [
                (one.text, other) for one, other in zip(ours, theirs[name]["texts"], strict=True) if one.text and other
            ]
            print(
                f"  texts that both keep: {len(both)}, with the same lines: {sum(one == other for one, other in both)}"
            )


if __name__ == "__main__":
    main()
