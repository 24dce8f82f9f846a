"""Plan a run before it is paid for: which node types it fits, how long it takes there, and what that costs.

cluster file, config --arithmetic.py--> fits? how long is a step?  --simulation.py--> days and dollars on spot
                                                ^ calibrated by one measured run
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from springtide.config import Config, difference
from springtide.config.cluster_file import ClusterFile, NodeType, parse_cluster
from springtide.config.devices import figures_of, known_devices
from springtide.config.input_paths import find_input
from springtide.elastic.group_sizes import evenness
from springtide.errors import ConfigError, explain
from springtide.planning.arithmetic import (
    ASSUMED_EFFICIENCY,
    ModelSize,
    model_size,
    predicted_step_bytes,
    state_bytes,
    step_time,
)
from springtide.planning.calibration import Calibration, calibrate
from springtide.planning.device_memory import USABLE_SHARE, usable_bytes
from springtide.planning.estimate import gigabytes, num_ids
from springtide.planning.spot import Market, saves_of, spot_of

_CHANGES: tuple[dict[str, Any], ...] = (
    {"train.micro_batch": 1},
    {"parallel.recompute": "selective"},
    {"parallel.recompute": "full"},
    {"parallel.strategy": "zero3", "parallel.shard_workers": 0},
    {"train.micro_batch": 1, "parallel.recompute": "full"},
    {"train.micro_batch": 1, "parallel.recompute": "full", "parallel.strategy": "zero3", "parallel.shard_workers": 0},
)
"""Changes of settings that may make a step fit in device memory, the smallest first. No change alters what is learned."""
_DAY_S = 86400.0
_MOST_MICRO_BATCH = 2**12


def load_cluster(path: str) -> ClusterFile:
    """Read a cluster file (node types with prices), and make the paths of its records of spot capacity absolute. Raises
    ConfigError if the file is missing or invalid."""
    file = Path(path)
    try:
        if file.exists() and not file.is_file():
            raise ConfigError(explain("cluster", path, "is not a file", "name a YAML file"))
        with file.open("rb") as opened:
            text = opened.read(2**20)
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise ConfigError(explain("cluster", path, problem, "name a file in the form of docs/how-to/plan.md")) from None
    found = parse_cluster(text, path)
    try:
        traces = [
            find_input(f"node_types.{at}.trace", one.trace, str(file.parent)) for at, one in enumerate(found.node_types)
        ]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    types = [one.model_copy(update={"trace": trace}) for one, trace in zip(found.node_types, traces, strict=True)]
    return found.model_copy(update={"node_types": tuple(types)})


def plan(config: Config, cluster: str, measured: str = "", measured_on: str = "", vocab_size: int = 0) -> Plan:
    """Forecast memory, time and costs of a run on the node types of a cluster file. Nothing is started or written.

    Args:
        config: settings of the run; with ``train.micro_batch: auto`` the largest micro-batch that fits is used.
        cluster: path of a cluster file, in the form of docs/how-to/plan.md.
        measured: folder of a run with some steps, which calibrates the roofline; empty: an efficiency is assumed.
        measured_on: name of the node type that the measured run used; needed if the cluster file has several node types and the
            run's device does not identify one of them.
        vocab_size: number of token ids; 0: use ``model.vocab_size``, or ``corpus.vocab_size`` if ``model.vocab_size`` is 0.

    Returns:
        A row for each node type and number of nodes, the cheapest first; rows in which the run does not fit come last.

    Raises:
        ConfigError: the cluster file is invalid, the measured run cannot calibrate the plan, the model is not a plain decoder,
            or the run fits on no node type. In the last case, the message has, for each row, the smallest change with which
            the run would fit.

    Examples:
        >>> found = st.plan(st.recipes.llama3_8b(), "nodes.yaml")
        >>> [(row.node_type, row.world_size, row.fits) for row in found.rows][-2:]
        [('laptop', 1, False), ('laptop', 2, False)]
    """
    file = load_cluster(cluster)
    _check_known(config)
    size = model_size(config.model, num_ids(config, vocab_size), config.shards.sequence_length)
    calibration = calibrate(measured, measured_on, file) if measured else None
    markets = {node.name: _market(node, cluster) for node in file.node_types}
    rows = [
        _row(config, size, file, node, nodes, markets[node.name], calibration)
        for node in file.node_types
        for nodes in _sizes(node.max_nodes)
    ]
    if not any(row.fits for row in rows):
        raise ConfigError(_nothing_fits(config, size, file, rows))
    rows.sort(key=lambda row: (not row.fits, row.dollars, row.days if row.fits else 0.0, row.node_type, row.world_size))
    return Plan(size.num_parameters, int(config.train.total), tuple(rows), _told(calibration))


def _market(node: NodeType, cluster: str) -> Market:
    try:
        return Market.of(node)
    except ConfigError as error:
        raise ConfigError(f"{cluster}: trace of {node.name}: {error}") from None


def _told(calibration: Calibration | None) -> str:
    if calibration is None:
        return (
            f"roofline with an assumed efficiency of {ASSUMED_EFFICIENCY:.2f}, from one H200 (benchmarks/RESULTS.md); "
            "--measured RUN takes yours"
        )
    return calibration.describe()


def _check_known(config: Config) -> None:
    """Raise ConfigError for an adapter and for a user's own model, optimizer or objective: their size cannot be calculated."""
    for field, value, usual in (
        ("model.source", config.model.source, ""),
        ("model.adapter", config.model.adapter, "none"),
        ("optim.source", config.optim.source, ""),
        ("objective.source", config.objective.source, ""),
    ):
        if value != usual:
            remedy = f"for its memory only, leave out --cluster; for an upper bound, plan with {field} = {usual!r}"
            raise ConfigError(
                explain(field, value, "is not known to a plan, which counts the decoder's weights", remedy)
            )


def _sizes(most: int) -> Iterator[int]:
    """Yield the numbers of nodes to plan for: the powers of two below ``most``, and ``most``."""
    nodes = 1
    while nodes < most:
        yield nodes
        nodes *= 2
    yield most


def _fitted(config: Config, size: ModelSize, node: NodeType, workers: int) -> Config:
    """Return ``config`` for ``workers`` workers; a micro-batch of ``auto`` is replaced by the largest that fits in memory."""
    elastic, changes = config.elastic, {"elastic.max_workers": max(workers, config.elastic.min_workers)}
    if elastic.min_workers > workers:
        changes = {"elastic.min_workers": workers, "elastic.max_workers": workers}
    found = config.override(changes)
    if found.train.micro_batch != "auto":
        return found
    best, rows = found.override({"train.micro_batch": 1}), -(-config.stream.global_batch // workers)
    at_once, room = 2, _room(found, node)
    while at_once <= min(rows, _MOST_MICRO_BATCH):
        larger = found.override({"train.micro_batch": at_once})
        if predicted_step_bytes(larger, size, workers) > room:
            break
        best, at_once = larger, 2 * at_once
    return best


def _room(config: Config, node: NodeType) -> float:
    """Return how much of a device's memory a step may take [bytes]. This is the smaller of two amounts: nine tenths of the
    memory, and what the CUDA context and NCCL's buffers leave free."""
    return min(USABLE_SHARE * node.device.memory, float(usable_bytes(config, node.device.memory)))


def _cannot(config: Config, workers: int) -> str:
    """Return why lanes (fixed shares of a batch) or shards do not allow a group of ``workers``; empty if they allow it."""
    lanes, shards = config.stream.num_lanes, config.parallel.shards
    if workers > lanes:
        return f"stream.lanes = {lanes} are fewer than {workers} workers; raise stream.global_batch"
    if shards and workers % shards:
        return f"{workers} workers are not a multiple of parallel.shard_workers = {shards}; change it, or use 0"
    return ""


def _row(
    config: Config,
    size: ModelSize,
    file: ClusterFile,
    node: NodeType,
    nodes: int,
    market: Market,
    calibration: Calibration | None,
) -> PlanRow:
    workers = nodes * node.devices
    if why := _cannot(config, workers):
        return PlanRow(node.name, nodes, workers, why, 0, int(node.device.memory), "", 0, math.nan)
    chosen = _fitted(config, size, node, workers)
    needed, state = predicted_step_bytes(chosen, size, workers), state_bytes(size, config.optim)
    row: dict[str, Any] = {
        "node_type": node.name,
        "nodes": nodes,
        "world_size": workers,
        "memory_bytes": needed,
        "device_bytes": int(node.device.memory),
        "layout": _layout(chosen),
        "micro_batch": chosen.train.rows_at_once,
        "evenness": evenness(chosen.stream.num_lanes, workers),
    }
    if why := _too_large(chosen, size, node, workers, needed, state):
        return PlanRow(why=why, **row)
    parts = step_time(chosen, size, node, workers)
    exactly = calibration is not None and calibration.is_of(chosen, size, node.name, workers)
    efficiency = calibration.efficiency if calibration else ASSUMED_EFFICIENCY
    step_s = calibration.step_s if exactly and calibration else parts.step_s(efficiency)
    saves = saves_of(chosen, step_s, state / workers, market, nodes, calibration)
    train_s = int(config.train.total) / config.tokens_per_step * step_s
    stays_s = train_s * (1 + saves.cost_s / saves.every_s)
    prices, sources = node.prices, {"memory": "arithmetic", "prices": "cluster file", "save_every_s": saves.reason}
    hours = nodes * stays_s / 3600
    row["on_demand_dollars"] = None if prices.on_demand is None else hours * prices.on_demand
    if prices.spot is not None:
        least = _least_nodes(chosen, size, node, nodes)
        spot = spot_of(chosen, node, nodes, least, market, step_s, saves, calibration)
        row["spot_days"] = train_s / spot.speed / _DAY_S if spot.speed else None
        row["spot_dollars"] = row["spot_days"] and row["spot_days"] * 24 * spot.nodes * prices.spot
        row["of_ideal"], sources["spot"] = spot.of_ideal, spot.source
    if exactly:
        sources["tokens_per_s"] = f"{MEASURED} in run {calibration.run}" if calibration else ""
    else:
        sources["tokens_per_s"] = f"roofline x {efficiency:.2f} " + (
            f"of {calibration.run}" if calibration else "assumed"
        )
    checkpoint = config.checkpoint
    kept = checkpoint.keep_last + checkpoint.keep_best
    if checkpoint.keep_every:
        kept += config.num_steps // checkpoint.keep_every
    stored = kept * state
    month = None if file.storage_price is None else stored / 1e9 * file.storage_price
    return PlanRow(
        why="",
        step_s=step_s,
        tokens_per_s=config.tokens_per_step / step_s,
        efficiency=math.nan if exactly else efficiency,
        days=stays_s / _DAY_S,
        save_every_s=saves.every_s,
        save_reason=saves.reason,
        checkpoint_bytes=state,
        storage_bytes=stored,
        storage_dollars=month,
        settings=_changed(config, chosen),
        sources=sources,
        **row,
    )


def _changed(config: Config, chosen: Config) -> dict[str, Any]:
    return {name: new for name, (_, new) in difference(config, chosen).items()}


def _layout(config: Config) -> str:
    parallel = config.parallel
    over = f" over {parallel.shards}" if parallel.shards > 1 else ""
    again = "" if parallel.recompute == "none" else f", recompute {parallel.recompute}"
    return f"{parallel.strategy}{over}, {parallel.precision}{again}"


def _too_large(config: Config, size: ModelSize, node: NodeType, workers: int, needed: int, state: int) -> str:
    """Return why a step does not fit in device memory, or a staged save in host memory, with the smallest change of settings
    that would help; empty if both fit."""
    room = _room(config, node)
    staged = round(state / workers * min(workers, node.devices)) if config.checkpoint.stage else 0
    if staged > node.host_memory:
        short = f"a save stages {gigabytes(staged)} in the {gigabytes(node.host_memory)} of a node"
        return f"{short}; take more nodes, or checkpoint.stage = ''"
    if needed <= room:
        return ""
    short = f"a step needs {gigabytes(needed)}, and may take {gigabytes(round(room))} of {node.device.name}"
    return f"{short}; {_remedy(config, size, node, workers) or 'no change of layout or micro-batch alone is enough'}"


def _remedy(config: Config, size: ModelSize, node: NodeType, workers: int) -> str:
    for changes in _CHANGES:
        other = config.override(changes)
        needed = predicted_step_bytes(other, size, workers)
        if other != config and needed <= _room(other, node):
            words = " and ".join(
                f"{name} = {value}" for name, value in changes.items() if name != "parallel.shard_workers"
            )
            return f"{words} needs {gigabytes(needed)}"
    return ""


def _least_nodes(config: Config, size: ModelSize, node: NodeType, nodes: int) -> int:
    """Return the fewest nodes, at most ``nodes``, on which a step fits in device memory."""
    for fewer in range(1, nodes):
        workers = fewer * node.devices
        if workers < config.elastic.min_workers or _cannot(config, workers):
            continue
        if predicted_step_bytes(config, size, workers) <= _room(config, node):
            return fewer
    return nodes


def _nothing_fits(config: Config, size: ModelSize, file: ClusterFile, rows: list[PlanRow]) -> str:
    """Return the error message for a config that fits no node type, with the changes or devices with which it would fit."""
    lines = [f"  {row.where}: {row.why}" for row in rows]
    usable = [row for row in rows if row.memory_bytes]
    best = ""
    if usable:
        least = min(usable, key=lambda row: row.memory_bytes)
        large = [
            (found.memory, name)
            for name in known_devices()
            if (found := figures_of(name)) and least.memory_bytes <= USABLE_SHARE * found.memory
        ]
        if large:
            best = f"\nas configured, a node type of {least.world_size} workers with a {min(large)[1]} each would fit"
        else:
            best = f"\nas configured, {least.world_size} workers need {gigabytes(least.memory_bytes)} each"
    model = f"{size.num_parameters / 1e6:,.1f}M parameters"
    problem = f"fits none of {len(file.node_types)} node types"
    return explain("model", model, problem, "what would fit:") + "\n" + "\n".join(lines) + best


# The rows of a plan, one for each node type and world size, as values, text, HTML and plain data.

MEASURED = "measured"
"""A text in ``PlanRow.sources`` begins with this word if its figure was measured."""
_HEADS = (
    *("node type", "nodes", "workers", "memory", "layout", "micro-batch", "tokens/s", "even", "on demand", "spot"),
    *("save every", "checkpoints"),
)
_LEFT = {"node type", "layout"}


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """The forecast of a run on one node type at one world size."""

    node_type: str
    nodes: int
    world_size: int
    why: str
    """Why the run does not fit, and the smallest change with which it would; empty if it fits."""
    memory_bytes: int
    """Device memory that a step needs [bytes]."""
    device_bytes: int
    """Memory of a device [bytes]."""
    layout: str
    """Sharding strategy, precision and recomputation of activations, as text."""
    micro_batch: int
    """Rows of a micro-batch [rows]."""
    evenness: float
    """Mean share of a step in which a worker computes; in the rest of the step it waits for workers with more rows."""
    step_s: float = math.nan
    tokens_per_s: float = math.nan
    efficiency: float = math.nan
    """Assumed or calibrated efficiency of the roofline; NaN if the step time itself was measured."""
    days: float = math.nan
    """Time to train ``train.total`` tokens on nodes that are never lost [days]."""
    on_demand_dollars: float | None = None
    spot_days: float | None = None
    """Time to train ``train.total`` tokens on spot nodes; None if not known [days]."""
    spot_dollars: float | None = None
    of_ideal: float | None = None
    """Productive time on the record of spot capacity, as a share of a run that loses no time; None without a record."""
    save_every_s: float = math.nan
    save_reason: str = ""
    checkpoint_bytes: int = 0
    storage_bytes: int = 0
    """Size of all checkpoints that are kept [bytes]."""
    storage_dollars: float | None = None
    """Price of storing all kept checkpoints [dollars/month]."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Dotted name -> value of each setting that was changed from the given config so that the run fits."""
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Name of a figure of this row -> where the figure comes from, as text."""

    @property
    def where(self) -> str:
        """The node type and number of workers, as text."""
        return f"{self.node_type}, {self.world_size} worker{'s' * (self.world_size != 1)}"

    @property
    def fits(self) -> bool:
        """Whether a step fits the devices."""
        return not self.why

    @property
    def dollars(self) -> float:
        """The lower of the run's costs on on-demand and on spot nodes; infinity if no price is known or a step does not fit."""
        known = [one for one in (self.on_demand_dollars, self.spot_dollars) if one is not None]
        return min(known, default=math.inf) if self.fits else math.inf


@dataclasses.dataclass(frozen=True)
class Plan:
    """Memory, time and costs of a run on each node type of a cluster file, cheapest first.

    Examples:
        >>> found = st.plan(st.recipes.gpu_1b(), "nodes.yaml")
        >>> found.cheapest.node_type, found.cheapest.layout
        ('8xh100', 'zero3, bf16, recompute selective')
    """

    num_parameters: int
    tokens: int
    """Number of tokens to train on [tokens]."""
    rows: tuple[PlanRow, ...]
    calibration: str
    """Where the roofline's efficiency comes from."""

    @property
    def cheapest(self) -> PlanRow:
        """The cheapest row in which the run fits, which is the first row."""
        return self.rows[0]

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, as ``springtide plan --json`` prints it. Figures that are not known are None."""
        rows = [
            {**{key: _plain(value) for key, value in dataclasses.asdict(row).items()}, "fits": row.fits}
            for row in self.rows
        ]
        head = {"num_parameters": self.num_parameters, "tokens": self.tokens, "calibration": self.calibration}
        return {**head, "rows": rows}

    def describe(self) -> str:
        """Return the plan as a text table, with a legend of its marks below."""
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
    """Return column -> its text in the table's row for ``row``; empty for a figure that is not known."""
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
