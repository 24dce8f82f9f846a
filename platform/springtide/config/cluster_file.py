"""The cluster file of ``springtide plan``: the nodes that can be rented, their devices and their prices.

    node_types:
      - name: p5.48xlarge
        devices: 8
        device: H100
        host_memory: 2TB
        prices: {on_demand: 98.32, spot: 39.50}
        links: {inside: 450GB, between: 400GB}
        max_nodes: 8
    storage_price: 0.023

This schema is separate from a run's config.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from springtide.config.devices import figures_of, known_devices
from springtide.config.files import in_words, nearest
from springtide.config.quantities import Bytes, Flops, Seconds
from springtide.config.section import Section
from springtide.config.yaml_text import Parsed, Path, read_given
from springtide.errors import ConfigError, explain

_MOST_BYTES = 2**18
_MOST_TYPES = 64
_MOST_NODES = 65_536
_PROBLEMS_SHOWN = 30


class Device(Section):
    """An accelerator of a node. For a node that trains on CPUs: one worker's share of the node."""

    name: str = Field(min_length=1, max_length=64)
    """Name that the maker gives the device [name]."""
    memory: Bytes = Field(gt=0)
    """Memory that a worker may use [bytes]."""
    flops: Flops = Field(gt=0)
    """Dense FLOP/s in the number type that ``parallel.precision`` names, bf16 in most recipes [FLOP/s]."""
    bandwidth: Bytes = Field(gt=0)
    """Bandwidth of the device memory [bytes/s]."""


def _known(value: Any) -> Any:
    """Replace the name of a device by its figures; return any other value unchanged."""
    if not isinstance(value, str):
        return value
    if (found := figures_of(value)) is None:
        sizes = [name for name in known_devices() if name.startswith(f"{value.upper()} ")]
        hint = f"sold with {' and '.join(sizes)}" if sizes else f"not one of {', '.join(known_devices())}"
        raise ValueError(f"is {hint}; give one, or a table of name, memory, flops, bandwidth")
    return {
        "name": value,
        "memory": int(found.memory),
        "flops": found.flops,
        "bandwidth": int(found.bandwidth),
    }


class NodePrices(Section):
    """Prices of a node: on demand, spot, or both."""

    on_demand: float | None = Field(None, ge=0)
    """On demand: price of a node that the cloud does not preempt [dollars/h]."""
    spot: float | None = Field(None, ge=0)
    """Price of a spot node, which the cloud may preempt [dollars/h]."""

    @model_validator(mode="after")
    def _check(self) -> NodePrices:
        if self.on_demand is None and self.spot is None:
            raise ValueError("has neither on_demand nor spot")
        return self


class Links(Section):
    """Bandwidth between workers, in one direction."""

    inside: Bytes | None = Field(None, gt=0)
    """Bandwidth from one device to another in the same node, as with NVLink; needed if a node has several devices [bytes/s]."""
    between: Bytes | None = Field(None, gt=0)
    """Bandwidth from one node to another, all network cards of a node together; needed if there may be several nodes
    [bytes/s]."""


class NodeType(Section):
    """A kind of node that can be rented."""

    name: str = Field(min_length=1, max_length=64)
    """Name that the cloud gives the node type [name]."""
    devices: int = Field(1, ge=1, le=256)
    """Devices of a node, each for one worker [workers]."""
    device: Annotated[Device, BeforeValidator(_known)]
    """The node's device: a known name such as ``H100``, or a table of name, memory, flops and bandwidth."""
    host_memory: Bytes = Field(gt=0)
    """Memory of the node's CPUs, where saves are staged and snapshots are kept [bytes]."""
    prices: NodePrices
    """Price of a node by market."""
    links: Links = Links()
    """Bandwidth between workers."""
    max_nodes: int = Field(1, ge=1, le=_MOST_NODES)
    """Most nodes of this kind that can be rented at once [nodes]."""
    zones: tuple[str, ...] = ()
    """Zones that have such nodes. In a simulation, each zone replays the record of spot capacity in ``trace``, from a different
    point in time [names]."""
    trace: str = ""
    """File with a record of spot capacity, as ``springtide plan --trace`` reads it. The path is looked up next to the cluster
    file and in the current folder; empty if there is no record [name]."""
    notice: Seconds = Seconds(120.0)
    """Time between a preemption notice and the loss of a spot node; 0 for no notice [s]."""

    @model_validator(mode="after")
    def _check(self) -> NodeType:
        if self.devices > 1 and self.links.inside is None:
            raise ValueError(f"links.inside is missing, and a node has {self.devices} devices")
        if self.max_nodes > 1 and self.links.between is None:
            raise ValueError(f"links.between is missing, and there may be {self.max_nodes} nodes")
        if self.trace and self.prices.spot is None:
            raise ValueError("prices.spot is missing, and trace is a record of spot nodes")
        return self


class ClusterFile(Section):
    """The nodes that can be rented, and the price of storage."""

    node_types: tuple[NodeType, ...] = Field(min_length=1, max_length=_MOST_TYPES)
    """Kinds of nodes; a run uses nodes of one kind."""
    storage_price: float | None = Field(None, ge=0)
    """Price of a GB in the object store for a month [dollars/month]."""

    @model_validator(mode="after")
    def _check(self) -> ClusterFile:
        names = [one.name for one in self.node_types]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"node_types has {twice[0]!r} twice")
        return self


_REMEDIES = {
    "prices": "give prices: {on_demand: DOLLARS_PER_HOUR, spot: DOLLARS_PER_HOUR}, or one of them",
    "node_types": "list at least one node type, each with a name of its own",
    "links": "give links: {inside: BYTES_PER_SECOND, between: BYTES_PER_SECOND}",
}


def parse_cluster(text: bytes, name: str) -> ClusterFile:
    """Parse the text of a cluster file.

    Args:
        text: YAML.
        name: name of the file, for errors.

    Raises:
        ConfigError: each problem with file, line, field, value and remedy.

    Examples:
        >>> from springtide.config.cluster_file import parse_cluster
        >>> parse_cluster(b"node_types: [{name: a, device: H100, host_memory: 1TB}]", "c.yaml")
        Traceback (most recent call last):
        springtide.errors.ConfigError: c.yaml:1: node_types.0.prices: is missing; give prices: ...
    """
    if len(text) > _MOST_BYTES:
        raise ConfigError(explain("cluster", name, f"is larger than {_MOST_BYTES:,} bytes", "is it a cluster file?"))
    given = read_given(text, name, "cluster", ClusterFile)
    data = given.data
    if not isinstance(data, dict):
        problem = f"is {type(data).__name__}, not a table with node_types"
        raise ConfigError(explain("cluster", name, problem, "see docs/how-to/plan.md"))
    try:
        return ClusterFile.model_validate(data)
    except ValidationError as error:
        # pydantic drops invalid entries, and may then report that the list is too short: hide that misleading error
        wrong = [item for item in error.errors() if not (item["type"] == "too_short" and item["input"])]
        found = [_described(item, given, name) for item in wrong]
        more = [f"and {len(found) - _PROBLEMS_SHOWN} more"] if len(found) > _PROBLEMS_SHOWN else []
        raise ConfigError("\n".join([*dict.fromkeys(found[:_PROBLEMS_SHOWN]), *more])) from None


def _described(item: Any, given: Parsed, name: str) -> str:
    """Return one finding of pydantic as ``file:line: field = value: problem; remedy``."""
    path = tuple(item["loc"])
    field, where = ".".join(map(str, path)), f"{name}:{given.line(path)}: "
    last, said = str(path[-1]) if path else "", in_words(item)
    known = next((fields for fields in (_fields(path[:-1]),) if fields), {})
    remedy = _REMEDIES.get(last) or next((_REMEDIES[one] for one in _REMEDIES if said.startswith(one)), "")
    if item["type"] == "extra_forbidden":
        return where + explain(field, item["input"], "is not a field here", nearest(last, known))
    if not remedy:
        about = known[last].description if last in known else "see docs/how-to/plan.md"
        remedy = f"it is: {' '.join(about.split())}" if last in known else about
    if item["type"] == "missing" or isinstance(item["input"], dict | Section):
        return f"{where}{field + ': ' if field else ''}{said}; {remedy}"
    return where + explain(field, item["input"], said, remedy)


def _fields(path: Path) -> dict[str, Any]:
    """Return the fields that the table at ``path`` of a cluster file may have; none if there is no such table."""
    tables: dict[Path, type[Section]] = {
        (): ClusterFile,
        ("node_types",): NodeType,
        ("node_types", "device"): Device,
        ("node_types", "prices"): NodePrices,
        ("node_types", "links"): Links,
    }
    table = tables.get(tuple(one for one in path if isinstance(one, str)))
    return dict(table.model_fields) if table else {}
