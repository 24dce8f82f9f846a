"""How long a step takes on a cluster that one has not rented yet: a roofline with one measured number.

    device    products at the device's FLOP/s, everything else at the speed of its memory     / efficiency
    host      beginning each operation, small ones as long as large ones                      / efficiency
    links     ring all-gather and reduce-scatter of weights and gradients
    step      on GPUs the longer of device and host, beside links: the longer of both, and of the shorter one the part that
              belongs to one block, which has nothing to hide behind; on CPUs, where the same cores do all, the sum

A kernel is limited by arithmetic or by memory (Williams, Waterman and Patterson, "Roofline", CACM 2009), and kernels run one
after the other: so their times add up. A ring of n moves (n - 1) / n of the bytes over each link (Patarasuk and Yuan,
"Bandwidth optimal all-reduce", 2009), and the slowest link counts: between nodes that of a node, which its devices share.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from springtide.config import Config
from springtide.config.cluster_file import NodeType
from springtide.elastic.evenness import most_lanes
from springtide.planning.memory import ModelSize, state_bytes

ASSUMED_EFFICIENCY = 0.62
"""Where nothing was measured: on one H200 models of 125M, of 1.3B and of 8B's shape had 0.59, 0.66 and 0.64, from the tokens/s
in benchmarks/RESULTS.md."""
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_BLOCK_STARTS, _FORWARD_STARTS, _OTHER_STARTS = 212, 73, 78
"""Operations that torch begins for a block, forward and backward; forward alone, which is what it recomputes; and beside all
blocks: as torch dispatches them (TorchDispatchMode), views and gradients included."""
_START_S = 14e-6
"""Time that a host takes to begin one, with matrices so small that there is nothing else: benchmarks/plan.py's machine [s]."""
_MESSAGE_S = 0.005
"""Time that a collective of one block takes beside its bytes, there: gloo between two ranks that both compute [s]."""


class StepTime(NamedTuple):
    """Where the time of a step goes, before it is overlapped [s]."""

    products_s: float
    """Matrix products and attention, at the device's FLOP/s."""
    memory_s: float
    """Norms, activations, logits, weights and moments, at the speed of its memory."""
    links_s: float
    blocks: int
    """Blocks whose communication overlaps with others' computation; 0: nothing overlaps."""
    host_s: float = 0.0
    """Beginning operations, which does not wait for the device."""

    def step_s(self, efficiency: float) -> float:
        """Return the duration of a step [s].

        Args:
            efficiency: of the device's part, 0 to 1; above 1 if the device is faster than it was said to be.
        """
        device_s = self.products_s + self.memory_s
        if not self.blocks:
            return (device_s + self.host_s) / efficiency + self.links_s
        device_s = max(device_s, self.host_s) / efficiency
        return max(device_s, self.links_s) + min(device_s, self.links_s) / self.blocks

    def efficiency(self, measured_s: float) -> float:
        """Return the efficiency with which a step takes ``measured_s``; the highest that is looked for if links alone take as
        long."""
        low, high = 1e-4, 1e4
        for _ in range(100):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.step_s(middle) > measured_s else (low, middle)
        return low


def step_time(config: Config, size: ModelSize, node: NodeType, world_size: int) -> StepTime:
    """Return the parts of the duration of a step.

    Args:
        config: settings of the run, with a number as micro-batch.
        size: of its model.
        node: the workers' node type.
        world_size: number of workers; whole nodes, or fewer than one has.
    """
    device, parallel, model = node.device, config.parallel, config.model
    lanes, length = config.stream.num_lanes, config.shards.sequence_length
    rows = most_lanes(lanes, world_size) * (config.stream.global_batch // lanes)
    micro_steps = -(-rows // config.train.rows_at_once)
    tokens = rows * length
    products_s = tokens * size.hardware_flops_per_token(parallel.recompute) / device.flops
    cast = _BYTES[parallel.computes_in]
    # read and written by what is not a product, forward and backward, in numbers
    width = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_width
    per_token = cast * size.num_layers * (24 * model.dim + 8 * width + 12 * model.ffn_dim)
    per_token += (12 + 2 * cast) * (size.table // model.dim)  # the softmax, in fp32
    moved = float(tokens * per_token + micro_steps * 3 * cast * size.num_parameters)
    shards = parallel.shards or world_size
    # gradients are clipped and read, moments and weights read and written
    moved += 2 * (state_bytes(size, config.optim) + 8 * size.num_parameters) / (1 if parallel.exact else shards)
    links_s = _links_s(config, size, node, world_size, shards, micro_steps)
    overlaps = size.num_layers if config.elastic.gpus_per_worker else 0
    host_s = micro_steps * _host_s(config, size.num_layers)
    return StepTime(products_s, moved / device.bandwidth, links_s, overlaps, host_s)


def _host_s(config: Config, num_layers: int) -> float:
    """Return the time that the host takes to begin the operations of a micro-batch; of compiled blocks only what is beside them
    [s]."""
    block = _BLOCK_STARTS + (_FORWARD_STARTS if config.parallel.recompute != "none" else 0)
    return _START_S * (_OTHER_STARTS + (0 if config.parallel.compile else num_layers * block))


def _links_s(config: Config, size: ModelSize, node: NodeType, workers: int, shards: int, micro_steps: int) -> float:
    """Return the time that weights and gradients of a step take on the slowest link [s]."""
    parallel, weights = config.parallel, size.num_parameters
    cast, summed = _BYTES[parallel.computes_in], 8 if parallel.exact else 4
    each = parallel.strategy == "zero3"
    gathers = 2 * micro_steps if each else 1
    reduces = micro_steps if parallel.strategy in ("zero2", "zero3") and not parallel.exact else 1
    sharded = (gathers * cast + reduces * summed) * weights
    found = 0.0
    if shards > 1:
        found += sharded * (shards - 1) / shards / _link(node, shards)
    if (copies := workers // shards) > 1:
        found += 2 * summed * weights / shards * (copies - 1) / copies / _link(node, workers)
    if workers > 1 and not config.elastic.gpus_per_worker:
        found += (gathers + reduces) * size.num_layers * _MESSAGE_S
    return found


def _link(node: NodeType, members: int) -> float:
    """Return the speed of the slowest link in a ring of ``members`` [bytes/s]."""
    inside = float(node.links.inside or math.inf)
    between = float(node.links.between or math.inf)
    return inside if members <= node.devices else min(inside, between)
