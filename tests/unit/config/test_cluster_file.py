"""A cluster file says what one may rent; whatever is wrong with it is told with file, line, field, value and remedy."""

from __future__ import annotations

import pytest

from springtide.config.cluster_file import parse_cluster
from springtide.config.devices import data_sheet, figures_of, known_devices
from springtide.errors import ConfigError

GOOD = """
node_types:
  - name: p5
    devices: 8
    device: H100
    host_memory: 2TB
    prices: {on_demand: 98.32, spot: 39.5}
    links: {inside: 450GB, between: 400GB}
    max_nodes: 4
"""


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as told:
        parse_cluster(text.encode(), "c.yaml")
    return str(told.value)


def test_a_known_device_needs_only_its_name() -> None:
    (node,) = parse_cluster(GOOD.encode(), "c.yaml").node_types
    assert (node.device.memory, node.device.flops, node.device.bandwidth) == (80e9, 989e12, 3.35e12)
    assert (node.prices.spot, node.links.between, node.zones) == (39.5, 400e9, ())


def test_every_known_device_has_figures() -> None:
    for name in known_devices():
        found = figures_of(name)
        assert found is not None
        assert data_sheet(name) is not None
        assert 1e9 < found.memory < found.bandwidth < found.flops


@pytest.mark.parametrize(
    ("change", "to", "said"),
    [
        ("    prices: {on_demand: 98.32, spot: 39.5}\n", "", "c.yaml:3: node_types.0.prices: is missing; give prices:"),
        ("{on_demand: 98.32, spot: 39.5}", "{}", "c.yaml:7: node_types.0.prices: has neither on_demand nor spot; give prices:"),
        ("spot: 39.5", "sport: 39.5", "c.yaml:7: node_types.0.prices.sport = 39.5: is not a field here; did you mean 'spot'?"),
        ("max_nodes", "max_node", "c.yaml:9: node_types.0.max_node = 4: is not a field here; did you mean 'max_nodes'?"),
        ("max_nodes: 4", "max_nodes: 0", "c.yaml:9: node_types.0.max_nodes = 0: must be at least 1; it is: Most nodes"),
        ("max_nodes: 4", "max_nodes: many", "c.yaml:9: node_types.0.max_nodes = 'many': is not a whole number"),
        ("98.32", "-1", "c.yaml:7: node_types.0.prices.on_demand = -1: must be at least 0.0; it is: On demand"),
        ("2TB", "2XB", "c.yaml:6: node_types.0.host_memory = '2XB': is not an amount of bytes"),
        ("device: H100", "device: H1000", "c.yaml:5: node_types.0.device = 'H1000': is not one of B200, H200 NVL"),
        ("device: H100", "device: A100", "is sold with A100 40GB and A100 80GB; give one, or a table"),
        ("inside: 450GB, ", "", "links.inside is missing, and a node has 8 devices; give links:"),
        (", between: 400GB", "", "links.between is missing, and there may be 4 nodes; give links:"),
        ("    max_nodes: 4", "    max_nodes: 4\n    max_nodes: 5", "c.yaml:10: node_types.0.max_nodes: is given twice"),
        ("node_types:", "node_type:", "c.yaml:2: node_types: is missing; list at least one node type"),
        ("spot: 39.5}", "}\n    trace: t.csv", "prices.spot is missing, and trace is a record of spot nodes; give prices:"),
        ("98.32", ".nan", "c.yaml:7: node_types.0.prices.on_demand = nan"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_line(change: str, to: str, said: str) -> None:
    assert change in GOOD
    found = refused(GOOD.replace(change, to))
    assert said in found, found
    assert found.startswith("c.yaml:")


def test_two_types_of_one_name_are_refused() -> None:
    twice = GOOD + GOOD.split("node_types:\n")[1]
    assert "node_types has 'p5' twice" in refused(twice)


@pytest.mark.parametrize("text", ["", "[1, 2]", "node_types: [", "a: " + "[" * 400, "node_types: []", "\x00"])
def test_what_is_no_cluster_file_is_refused_in_a_line(text: str) -> None:
    found = refused(text)
    assert "c.yaml" in found
    assert len(found) < 700


def test_aliases_that_multiply_are_read_once() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]  # 9**9 times x, spelled out
    found = refused("\n".join(lines))
    assert "c.yaml:9: a8 = [[[[" in found
    assert len(found) < 25_000
    assert "c.yaml:1: node_types.0 = [[" in refused("node_types: &a [*a]")


def test_an_error_under_an_alias_names_both_lines() -> None:
    """What is wrong under an alias is told with the lines of both."""
    one = "{name: %s, devices: 8, device: H100, host_memory: 2TB, prices: {spot: 1}, links: %s}"
    text = "node_types:\n- " + one % ("a", "&fast {inside: 9GB}") + "\n- " + one % ("b", "*fast")
    assert len(parse_cluster(text.encode(), "c.yaml").node_types) == 2
    found = refused(text.replace("9GB", "9XB"))
    assert "c.yaml:2: node_types.0.links.inside = '9XB'" in found
    assert "c.yaml:3: node_types.1.links.inside = '9XB'" in found
