"""Identities of runs and datasets are those that commit 0ba2dd87 computed, whatever settings come, go and are renamed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from springtide import config as configs
from springtide.config import Config
from springtide.dataset import fingerprint
from springtide.dataset.apart import ApartFrom

pytestmark = pytest.mark.processes

PLATFORM = Path(__file__).parents[3] / "platform"

TABLES: dict[str, Any] = {
    "corpus.sources": {"web": {"source": "/text/web", "field": "body", "min_characters": 9}, "code": "/text/code"},
    "corpus.apart_from": ["/data/exam", {"source": "/text/quiz.jsonl", "field": "question"}],
    "stream.ramp": [{"rows": 6, "until_tokens": 768}],
    "stream.lanes": 6,
    "stream.weights": [{"shares": {"web": 3.0, "code": 1.0}}],
    "stream.skip_samples": [{"from_step": 3, "samples": [1, 2]}],
    "stream.epoch_caps": {"code": 2.0},
    "optim.groups": [{"match": "*.bias", "weight_decay": 0.0}],
}
"""Settings that hold tables, whose fields are hashed, too."""

RECORDED = {
    "tiny": ("0034cb61da33cefe", "b0173c9924fdac11"),
    "demo": ("183738127bebfdb5", "339c33c70d39c398"),
    "gpu_125m": ("e78ae40333a42420", "72e5c69fd9ee0fb2"),
    "gpu_1b": ("e65ab1f53d59a554", "e41db61e73a203f8"),
    "gemma_2b": ("a9812adbba395537", "7a9477318939bade"),
    "gemma2_2b": ("05499b1c9cb8b6b2", "7a9477318939bade"),
    "gemma3_1b": ("3d48209670cf723b", "8a7f344aeac2a2e5"),
    "qwen3_4b": ("a5774f69c118e9ac", "25957a8483fef7f7"),
    "phi4_mini": ("d7f72c212c05f21e", "682d3f3dadf6519b"),
    "mistral_7b": ("f3bfa0b07384c370", "71d712e0cb3aae19"),
    "olmo2_7b": ("48516857f0d7b78f", "2c70f39176415e15"),
    "olmo3_7b": ("51e37761b399607b", "bd43d1a09dde4475"),
    "llama3_8b": ("8600ec445787f1c6", "c65c42592d9865d3"),
    "llama3_70b": ("d4e31af20b3d1fbd", "c65c42592d9865d3"),
    "sft": ("c563f7c23cbd8082", "a64b756c019a2855"),
    "lora": ("d4bdc35ab0189d4a", "a64b756c019a2855"),
    "grow": ("0f2ad6ee5c49a74e", "a64b756c019a2855"),
    "dpo": ("a42b1a8ee1fad415", "a64b756c019a2855"),
    "distill": ("cd04ce5ebe3aed1f", "3479bbdd207523e3"),
    "continue": ("4805ad77ccd34b1d", "3479bbdd207523e3"),
    "tables": ("fb46a464af47ef05", "b0cfb19eecc935f8"),
}
"""Recipe -> fingerprints of its run, and of its dataset without the files of the source, as commit 0ba2dd87 computed them.
Where one differs, users' runs are not found and their datasets are prepared again: give the setting that came, went or was
renamed its row in ``config/renames.py``, or leave the recipe as it is."""


def recipes() -> dict[str, Config]:
    """The configs of ``RECORDED``."""
    made = {name: recipe() for name, recipe in configs.recipes.RECIPES.items()}
    base = made["tiny"].override({"shards.dataset": "/data/old"})
    made |= {name: recipe(base, "runs/base") for name, recipe in configs.recipes.FINE_TUNING.items()}
    return {**made, "tables": made["tiny"].override(TABLES)}


def identities() -> dict[str, tuple[str, str]]:
    """The same, as this version computes them."""
    apart = ApartFrom((), (), ())
    return {
        name: (configs.fingerprint(config), fingerprint(config.corpus, config.shards, [], apart, {}))
        for name, config in recipes().items()
    }


def test_identities_are_those_of_the_first_users() -> None:
    found = identities()
    assert {name: found[name] for name in RECORDED} == RECORDED


ROWS = {
    "RETIRED_SETTINGS: dict[str, Retired]": """
        "corpus.max_symbols": Retired(1.0, "-", is_free=False), "train.seed": Retired(0, "-", is_free=False),
        "corpus.sources.*.max_symbols": Retired(None, "-", is_free=False),
        "corpus.apart_from.*.max_symbols": Retired(None, "-", is_free=False),""",
    "RENAMED_SETTINGS: dict[str, str]": """
        "corpus.broken_text": "corpus.broken_bytes", "optim.betas": "optim.momenta",
        "corpus.sources.*.broken_text": "corpus.sources.*.broken_bytes",
        "corpus.apart_from.*.broken_text": "corpus.apart_from.*.broken_bytes",""",
    "ADDED_SETTINGS: dict[str, Any]": """
        "corpus.novel": "off", "optim.novel": "off",
        "corpus.sources.*.novel": None, "corpus.apart_from.*.novel": None,""",
}
NOVEL = '    novel: str = "off"\n'
EDITS = {
    "config/data.py": {
        "    max_symbols: float | None = Field(None, ge=0, le=1)\n": "    novel: str | None = None\n",
        "    max_symbols: float = Field(1.0, ge=0, le=1)\n": NOVEL,
        "    broken_text:": "    broken_bytes:",
    },
    "config/engine.py": {"betas": "momenta", "    groups: tuple": f"{NOVEL}    groups: tuple"},
    "config/schema.py": {
        "    seed: int = Field(0, ge=0)\n": "",
        "    tries: int =": "    novel: int = free(default=1)\n    tries: int =",
    },
    "config/renames.py": {f"\n{table} = {{": f"\n{table} = {{{rows}" for table, rows in ROWS.items()},
}
"""A version of the package to come: settings retired, renamed and added, in tables and outside of them, with their rows."""


def of_a_version_to_come(tmp_path: Path, edits: dict[str, dict[str, str]]) -> str:
    """What that version computes, as text."""
    # with what is compiled already, and without what another process is compiling
    shutil.copytree(PLATFORM / "springtide", tmp_path / "springtide", ignore=shutil.ignore_patterns("*.pyc.*"))
    for name, changes in edits.items():
        text = (tmp_path / "springtide" / name).read_text()
        for before, after in changes.items():
            assert before in text, f"{name} has no {before!r} for this test to change"
            text = text.replace(before, after)
        (tmp_path / "springtide" / name).write_text(text)
    code = "import sys; sys.path.insert(0, sys.argv[1]); import test_identities as found; print(found.identities())"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parent}"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_identities_survive_settings_that_come_and_go(tmp_path: Path) -> None:
    now = str(identities())
    assert of_a_version_to_come(tmp_path / "with", EDITS) == now
    forgotten = {name: changes for name, changes in EDITS.items() if name != "config/renames.py"}
    assert of_a_version_to_come(tmp_path / "without", forgotten) != now
