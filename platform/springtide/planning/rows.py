"""The rows of a plan: what each node type and world size would make of a run, as values, text, HTML and plain data."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Mapping
from typing import Any

MEASURED = "measured"
"""Beginning of the source of a figure that was not calculated."""
_HEADS = (
    *("node type", "nodes", "workers", "memory", "layout", "micro-batch", "tokens/s", "even", "on demand", "spot"),
    *("save every", "checkpoints"),
)
_LEFT = {"node type", "layout"}
_DAY_S = 86400.0


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """One node type at one world size."""

    node_type: str
    nodes: int
    world_size: int
    why: str
    """Why it does not fit, and what would; empty if it fits."""
    memory_bytes: int
    """Device memory that a step needs [bytes]."""
    device_bytes: int
    """Memory of a device [bytes]."""
    layout: str
    """Strategy, precision and recomputation."""
    micro_batch: int
    """Rows at once [rows]."""
    evenness: float
    """Part of a step in which the mean worker computes."""
    step_s: float = math.nan
    tokens_per_s: float = math.nan
    efficiency: float = math.nan
    """Efficiency of the roofline; NaN where the time was measured."""
    days: float = math.nan
    """Time to ``train.total`` on nodes that stay [days]."""
    on_demand_dollars: float | None = None
    spot_days: float | None = None
    """The same on spot nodes [days]."""
    spot_dollars: float | None = None
    of_ideal: float | None = None
    """What the record of spot capacity leaves of a run that loses no time."""
    save_every_s: float = math.nan
    save_reason: str = ""
    checkpoint_bytes: int = 0
    storage_bytes: int = 0
    """All checkpoints that are kept [bytes]."""
    storage_dollars: float | None = None
    """Price of them [dollars/month]."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Settings that differ from the recipe's, by dotted name."""
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Figure -> where it comes from, as text."""

    @property
    def where(self) -> str:
        """Its node type and number of workers, as text."""
        return f"{self.node_type}, {self.world_size} worker{'s' * (self.world_size != 1)}"

    @property
    def fits(self) -> bool:
        """Whether a step fits the devices."""
        return not self.why

    @property
    def dollars(self) -> float:
        """The lower of both prices; infinity if it does not fit."""
        known = [one for one in (self.on_demand_dollars, self.spot_dollars) if one is not None]
        return min(known, default=math.inf) if self.fits else math.inf


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run would take on each node type of a cluster file, cheapest first.

    Examples:
        >>> found = st.plan(st.recipes.gpu_1b(), "nodes.yaml")
        >>> found.cheapest.node_type, found.cheapest.layout
        ('8xh100', 'zero3, bf16, recompute selective')
    """

    num_parameters: int
    tokens: int
    """Tokens to train on [tokens]."""
    rows: tuple[PlanRow, ...]
    calibration: str
    """Where the roofline's efficiency comes from."""

    @property
    def cheapest(self) -> PlanRow:
        """The first row."""
        return self.rows[0]

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, as ``springtide plan --json`` prints it; None for what is not known."""
        rows = [
            {**{key: _plain(value) for key, value in dataclasses.asdict(row).items()}, "fits": row.fits}
            for row in self.rows
        ]
        head = {"num_parameters": self.num_parameters, "tokens": self.tokens, "calibration": self.calibration}
        return {**head, "rows": rows}

    def describe(self) -> str:
        """Return the plan as a table, with what each mark means below it."""
        cells = [_cells(row) for row in self.rows]
        heads = [head for head in _HEADS if any(one[head] for one in cells)]
        widths = {head: max(len(head), *(len(one[head]) for one in cells)) for head in heads}
        lines = [f"{self.num_parameters / 1e6:,.1f}M parameters, {self.tokens:,} tokens; the cheapest first"]
        for one in ({head: head for head in _HEADS}, *cells):
            padded = (
                one[head].ljust(widths[head]) if head in _LEFT else one[head].rjust(widths[head]) for head in heads
            )
            lines.append("  ".join(padded).rstrip())
        lines += [f"{one.where} does not fit: {one.why}" for one in self.rows if not one.fits]
        return "\n".join([*lines, *self._legend()])

    def _legend(self) -> list[str]:
        fitting = [row for row in self.rows if row.fits]
        found = [
            "a: by arithmetic; m: measured; R: roofline, not measured; r: simulated on a record; prices: the cluster file's"
        ]
        found.append(f"tokens/s: {self.calibration}")
        spot = dict.fromkeys(row.sources["spot"] for row in fitting if "spot" in row.sources)
        saves = dict.fromkeys(row.sources["save_every_s"] for row in fitting[:1])
        changed = fitting[0].settings if fitting else {}
        found += [f"spot: {one}" for one in spot]
        found += [f"saves: {one}" for one in saves]
        if changed:
            found.append(
                "settings of the first row: " + " ".join(f"--{name} {value}" for name, value in changed.items())
            )
        return found

    def _repr_html_(self) -> str:
        cells = [_cells(row) for row in self.rows]
        heads = [head for head in _HEADS if any(one[head] for one in cells)]
        head = "".join(f"<th>{html.escape(one)}</th>" for one in heads)
        body = ""
        for row, one in zip(self.rows, cells, strict=True):
            said = "; ".join(f"{name}: {source}" for name, source in row.sources.items())
            columns = "".join(f"<td>{html.escape(one[name])}</td>" for name in heads)
            body += f'<tr title="{html.escape(row.why or said)}">{columns}</tr>'
        notes = "".join(f"<p>{html.escape(line)}</p>" for line in self._legend())
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}"


def _cells(row: PlanRow) -> dict[str, str]:
    """Return the text of each column; empty for what is not known."""
    found = dict.fromkeys(_HEADS, "")
    found |= {"node type": row.node_type, "nodes": f"{row.nodes}", "workers": f"{row.world_size}"}
    if row.memory_bytes:
        found["memory"] = f"{row.memory_bytes / 1e9:.3g} of {row.device_bytes / 1e9:.3g} GB a"
        found["micro-batch"] = f"{row.micro_batch}"
    if not row.fits:
        return found | {"layout": "does not fit"}
    mark = "m" if row.sources["tokens_per_s"].startswith(MEASURED) else "R"
    found |= {
        "layout": row.layout,
        "tokens/s": f"{row.tokens_per_s:,.0f} {mark}",
        "even": f"{row.evenness:.0%}",
        "save every": _time(row.save_every_s),
        "checkpoints": _size(row.storage_bytes) + _month(row.storage_dollars),
    }
    if row.on_demand_dollars is not None:
        found["on demand"] = f"{_dollars(row.on_demand_dollars)} in {_days(row.days)}"
    if row.spot_dollars is not None and row.spot_days is not None:
        found["spot"] = f"{_dollars(row.spot_dollars)} in {_days(row.spot_days)}{' r' * (row.of_ideal is not None)}"
    return found


def _month(dollars: float | None) -> str:
    return "" if dollars is None else f", {_dollars(dollars)}/month"


def _dollars(dollars: float) -> str:
    return f"${dollars:,.0f}" if dollars >= 100 else f"${dollars:,.2f}"


def _days(days: float) -> str:
    return f"{days:,.3g} days" if days >= 1 else _time(days * _DAY_S)


def _time(time_s: float) -> str:
    if not math.isfinite(time_s):
        return "at the end"
    if time_s >= 3600:
        return f"{time_s / 3600:.3g} h"
    return f"{time_s / 60:.3g} min" if time_s >= 60 else f"{time_s:.3g} s"


def _size(size: int) -> str:
    return f"{size / 1e12:.3g} TB" if size >= 1e12 else f"{size / 1e9:.3g} GB"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return dict(value) if isinstance(value, Mapping) else value
