"""The model card of an export: where the weights come from. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from springtide.errors import printable, redacted

_ROWS = {
    "run": "Run",
    "base": "Adapter of",
    "base_precision": "Weights under the adapter",
    "checkpoint": "Checkpoint",
    "step": "Steps",
    "tokens": "Tokens",
    "chain": "Chain",
    "order_identity": "Data order",
    "config_fingerprint": "Config",
    "code_fingerprint": "Code",
    "tokenizer_digest": "Tokenizer",
    "dtype": "Type of the weights",
}
"""Fact -> its name in the table."""


def card(facts: Mapping[str, Any], has_end: bool) -> str:
    """Return README.md of an export. ``facts``: as in its springtide.json; ``has_end``: whether the id that ends a text is
    known."""
    library = "peft" if "base" in facts else "transformers"
    lines = ["---", f"library_name: {library}", "pipeline_tag: text-generation", "tags:", "- springtide", "---", ""]
    lines += [f"# {_plain(facts.get('run', 'model'))}", ""]
    averaged = "averaged weights" if facts.get("averaged") else "weights"
    what = f"{averaged} of the adapter" if "base" in facts else averaged
    lines += [f"The {what} of a springtide run, for `{facts['architecture']}` of transformers.", ""]
    if not has_end:
        lines += ["The id that ends a text is not known: set `eos_token_id` before you generate text.", ""]
    lines += ["## Where it comes from", "", "| | |", "|---|---|"]
    lines += [f"| {told} | {_code(facts[key])} |" for key, told in _ROWS.items() if facts.get(key) not in ("", None)]
    for url, found in facts.get("datasets", {}).items():
        lines.append(f"| Dataset {_code(url)} | {_code(found)} |")
    for url in facts.get("descends_from", ()):
        lines.append(f"| Begun with | {_code(url)} |")
    for label, value in facts.get("labels", {}).items():
        lines.append(f"| {_plain(label)} | {_code(value)} |")
    lines += [
        "",
        "The chain is a hash over all samples that were trained on, in order: `springtide verify RUN` computes it",
    ]
    lines += ["again from the datasets. Digests are of manifests, which hold those of all their files.", ""]
    return "\n".join(lines)


def _plain(value: Any) -> str:
    """Return text without what would be markup."""
    text = printable(redacted(str(value))).replace("\n", " ")
    return "".join(one for one in text if one.isalnum() or one in " -_.,:/@+()")


def _code(value: Any) -> str:
    text = printable(redacted(str(value))).replace("\n", " ").replace("`", "'").replace("|", "/")
    return f"`{text}`"
