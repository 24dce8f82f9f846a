"""The HTML page about a dataset: its source, the documents kept and dropped, and their lengths."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from springtide.run.report.charts import Bars, draw
from springtide.run.report.html import cards, grid, page, table, text


def render(name: str, manifest: Mapping[str, Any], digest: str, rows: Sequence[str] = ()) -> str:
    """Return the HTML page of a dataset. ``manifest``: a dataset's manifest as plain data; ``rows``: a few rows as text."""
    source, splits = manifest["source"], _by_split(manifest["sources"])
    dropped = {reason: count for reason, count in source["dropped"].items() if count}
    lengths = source["documents_by_tokens"]
    labels = [f"{low} to {high - 1}" for (low, _), (high, _) in itertools.pairwise(lengths)]
    labels.append(f"{lengths[-1][0]} and more")
    kept = sum(split["documents"] for split in splits.values())
    edits = list(source["edits"].items())
    edited = [Bars("Edited", "lines, values and documents, before deduplication", edits)] if edits else []
    charts = [
        Bars(
            "Length of documents",
            "documents, by tokens",
            _seen(zip(labels, (count for _, count in lengths), strict=True)),
        ),
        Bars("Where the tokens come from", "tokens, before deduplication", _seen(source["tokens_by_group"])),
        Bars("Documents kept and dropped", "documents", [("kept", kept), *dropped.items()]),
        *edited,
        Bars("Splits", "tokens", [(name, split["tokens"]) for name, split in splits.items()]),
    ]
    facts = {
        "source": str(source["source"]),
        "digest": digest,
        "vocabulary": f"{manifest['vocab_size']:,} ids, digest {manifest['tokenizer_digest']}",
        "rows": f"{manifest['sequence_length'] + 1} tokens of {manifest['token_type']}",
        "documents kept apart": "yes" if manifest["mask_across_documents"] else "no",
        "held out": f"{manifest['heldout_fraction']:.3g} of the documents",
        "apart from": ", ".join(source["apart_from"]) or "nothing (corpus.apart_from)",
        "files left out": ", ".join(source.get("left_out", ())) or "none",
    }
    broken = "\n".join(f"{found['name']}: {found['reason']}: {found['sample']!r}" for found in source["broken"])
    dropped_texts = "\n".join(map(_dropped, source["examples"]))
    sections = [
        cards(_figures(source, splits, kept)),
        f'<div class="charts">{"".join(f"<figure>{draw([chart])}</figure>" for chart in charts)}</div>',
        table("Facts", facts.items()),
        _sources(manifest["sources"]) if len(manifest["sources"]) > 1 else "",
        text("Broken documents, examples", broken) if broken else "",
        text("Dropped documents, examples", dropped_texts) if dropped_texts else "",
        text("A few rows", "\n\n".join(rows)) if rows else "",
    ]
    return page(name, sections)


def _dropped(found: Mapping[str, Any]) -> str:
    if "kept_name" not in found:
        return f"{found['name']}: {found['reason']}: {found['sample']!r}"
    alike = f" (similarity {found['similarity']:.2f})" if found["similarity"] < 1 else ""
    told = f"{found['name']}: {found['reason']} of {found['kept_name']}{alike}"
    if found["sample"] == found["kept_sample"]:
        return f"{told}: {found['sample']!r}"
    return f"{told}\n  dropped: {found['sample']!r}\n  kept:    {found['kept_sample']!r}"


def _by_split(sources: Mapping[str, Any]) -> dict[str, collections.Counter[str]]:
    """Return the counts of each split (training, held-out), summed over all sources."""
    found: dict[str, collections.Counter[str]] = {"train": collections.Counter(), "heldout": collections.Counter()}
    for splits in sources.values():
        for name, split in splits.items():
            counts = {key: split[key] for key in ("documents", "tokens", "rows")}
            found[name].update(counts, shards=split["shards"]["files"])
    return {name: counts for name, counts in found.items() if counts}


def _sources(sources: Mapping[str, Any]) -> str:
    columns = [("source", False), ("documents", True), ("tokens", True), ("rows", True), ("held-out tokens", True)]
    rows = []
    for name, splits in sources.items():
        train, heldout = (_by_split({name: splits}).get(split, collections.Counter()) for split in ("train", "heldout"))
        documents = train["documents"] + heldout["documents"]
        rows.append(
            ((name, *(f"{one:,}" for one in (documents, train["tokens"], train["rows"], heldout["tokens"]))), False)
        )
    return grid("Sources", columns, rows)


def _figures(source: Mapping[str, Any], splits: Mapping[str, Any], kept: int) -> list[tuple[str, str, str]]:
    tokens = sum(split["tokens"] for split in splits.values())
    return [
        ("documents", f"{kept:,}", f"of {source['documents']:,} read"),
        ("tokens", f"{tokens:,}", f"of {source['tokens_before_deduplication']:,} before deduplication"),
        (
            "characters per token",
            f"{source['characters'] / max(source['tokens_before_deduplication'], 1):.2f}",
            "on average",
        ),
        *((f"{name} rows", f"{split['rows']:,}", f"in {split['shards']} shards") for name, split in splits.items()),
    ]


def _seen(amounts: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    return [(label, amount) for label, amount in amounts if amount]
