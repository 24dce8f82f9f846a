"""Predict what a worker's device holds in a step, by arithmetic: in milliseconds, where ``planning/step_memory.py``, which
runs the step on tensors without memory, takes seconds and needs torch. Tests hold the two together.
Below: how long the step takes.

    between steps     weights, gradients, moments: sharded
    in a step         + whole weights (of all, or of two blocks), activations, logits of a part of the tokens, whole gradients
"""

from __future__ import annotations

import math
from typing import NamedTuple

from springtide.config import Config
from springtide.config.cluster_file import NodeType
from springtide.config.engine import ModelConfig, OptimConfig
from springtide.elastic.evenness import most_lanes

_VOCAB_MULTIPLE = 64
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_MOMENTS = {"fp32": 8.0, "bf16": 4.0, "int8": 2.0}
_LOGITS_AT_ONCE = {False: 2**22, True: 2**27}
"""Logits that are computed at a time, by whether it is a GPU, as in ``model/loss.py``."""


class ModelSize(NamedTuple):
    """Number of weights of a decoder, and what it computes for a token."""

    block_matrices: int
    """Weights of one block's matrices."""
    block_vectors: int
    num_layers: int
    table: int
    """Weights of the embedding; as many has the head."""
    tables: int
    """1 if they are the same, else 2."""
    last_norm: int
    attended: float
    """Tokens that a token attends to on average, summed over all layers, times the width of all heads."""

    @property
    def block(self) -> int:
        """Weights of a block."""
        return self.block_matrices + self.block_vectors

    @property
    def root(self) -> int:
        """Weights outside the blocks."""
        return self.tables * self.table + self.last_norm

    @property
    def num_parameters(self) -> int:
        """All weights, as ``model/decoder.py`` counts them."""
        return self.num_layers * self.block + self.root

    @property
    def flops_per_token(self) -> float:
        """FLOPs for a token, forward and backward, as ``model/decoder.py`` counts them."""
        return 6.0 * (self.num_layers * self.block_matrices + self.table) + 12.0 * self.attended

    def hardware_flops_per_token(self, recompute: str) -> float:
        """The same with what is recomputed in backward."""
        again = 2.0 * self.num_layers * self.block_matrices + 4.0 * self.attended
        return self.flops_per_token + (again if recompute == "full" else 0.0)


def model_size(model: ModelConfig, vocab_size: int, length: int) -> ModelSize:
    """Return the size of the decoder that ``model`` describes.

    Args:
        model: architecture; of a model of one's own, or of an adapter, nothing is known here.
        vocab_size: number of token ids.
        length: of a row [tokens].

    Examples:
        >>> from springtide.planning.arithmetic import model_size
        >>> round(model_size(st.recipes.llama3_8b().model, 128_256, 8192).num_parameters / 1e9, 2)
        8.03
    """
    width, kv_width = model.num_heads * model.head_width, model.num_kv_heads * model.head_width
    norms = {"none": 0, "head": 2 * model.head_width, "all_heads": width + kv_width}
    vectors = model.dim * (4 if model.norms == "both" else 2) + norms[model.qk_norm]
    windows = (min(model.window_of(layer) or length, length) for layer in range(model.num_layers))
    padded = model.vocab_size or -(-vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
    return ModelSize(
        block_matrices=model.dim * (2 * width + 2 * kv_width + 3 * model.ffn_dim),
        block_vectors=vectors + (width + 2 * kv_width) * model.qkv_bias,
        num_layers=model.num_layers,
        table=padded * model.dim,
        tables=1 if model.tied_head else 2,
        last_norm=model.dim,
        attended=sum(window - window**2 / (2 * length) for window in windows) * width,
    )


def state_bytes(size: ModelSize, optim: OptimConfig) -> int:
    """Return the bytes of weights, moments and averaged weights, which is what a checkpoint holds."""
    return round(size.num_parameters * (4 + 4 * bool(optim.ema_half_life)) + _moments(size, optim))


def _moments(size: ModelSize, optim: OptimConfig) -> float:
    matrices = size.num_layers * size.block_matrices
    if optim.optimizer == "adafactor":
        return 4.0 * 2 * math.sqrt(size.num_parameters) * size.num_layers
    spared = 4.0 * matrices if optim.optimizer == "muon" else 0.0  # one moment, not two
    return _MOMENTS[optim.moments] * size.num_parameters - spared


class Activations(NamedTuple):
    """Bytes that forward keeps for backward, per token."""

    kept: float
    """By each block."""
    again: float
    """What one block holds in addition while it is recomputed."""
    around: float
    """Hidden states at both ends."""


def activations(model: ModelConfig, recompute: str, precision: str, gpu: bool) -> Activations:
    """Return what a decoder keeps for backward.

    Args:
        model: architecture.
        recompute: as ``parallel.recompute``.
        precision: as ``parallel.computes_in``.
        gpu: whether it is a GPU, whose attention kernels need a key head for each query head.
    """
    size, width, kv_width = _BYTES[precision], model.num_heads * model.head_width, model.num_kv_heads * model.head_width
    results = 2 * width + 2 * kv_width + model.dim + 2 * model.ffn_dim  # of products and attention
    repeated = 2 * width if gpu and kv_width < width and (precision != "bf16" or model.attention_cap) else 0
    others = 2 * model.dim + 2 * width + 2 * model.ffn_dim + repeated
    whole = float(size * (model.dim + results + others)) + (10.0 * model.dim if size < 4 else 0.0)  # norms are in fp32
    kept = {"none": whole, "selective": size * (model.dim + results + model.dim), "full": size * model.dim}[recompute]
    return Activations(kept, whole - kept, 3.0 * size * model.dim + 4.0 * model.dim)


def predicted_step_bytes(config: Config, size: ModelSize, world_size: int) -> int:
    """Return about the bytes that ``planning/step_memory.py`` predicts, for a decoder without adapter.

    Args:
        config: settings of the run, with a number as micro-batch.
        size: of its model.
        world_size: number of workers.
    """
    parallel, gpu = config.parallel, config.elastic.gpus_per_worker > 0
    rows = -(-config.stream.global_batch // world_size)
    at_once = min(config.train.rows_at_once, rows)
    tokens = at_once * config.shards.sequence_length
    several = rows > at_once
    cast, summed = _BYTES[parallel.computes_in], 8 if parallel.exact else 4
    shards = parallel.shards or world_size
    kept = activations(config.model, parallel.recompute, parallel.computes_in, gpu)
    logits = min(_LOGITS_AT_ONCE[gpu], all_logits := tokens * size.table // config.model.dim)
    head = (4 + 2 * cast + cast * (all_logits > logits)) * logits + kept.around * tokens + 4 * size.table
    there = kept.kept * tokens * (1 if gpu and parallel.offloads_activations else size.num_layers)
    forward, backward = there + head, there + kept.again * tokens
    states, weights = state_bytes(size, config.optim), size.num_parameters
    shares = math.inf if gpu and parallel.offloads_parameters else shards  # with these, shards are on the host
    if world_size == 1 and not parallel.exact and parallel.offload == "none":
        copies = 0
        if (
            cast < 4
        ):  # weights are converted where they are used, and backward of what is not recomputed keeps the copies
            kept_blocks = size.num_layers * size.block_matrices if parallel.recompute == "none" else 0
            copies = cast * (2 * size.table + kept_blocks)
        return round(states + 4 * weights + copies + max(forward, backward))
    blocks = size.block if parallel.strategy == "zero3" else size.num_layers * size.block
    whole = cast * (size.root + blocks)
    if parallel.exact or parallel.strategy in ("ddp", "zero1"):
        before = float(summed * weights) if several else 0.0
    else:
        before = 4 * weights / shares + summed * size.root if several else 0.0
    if cast < 4 or (shards > 1 and parallel.strategy != "zero3"):
        forward += cast * size.table
    step = whole + before + max(forward, backward)
    last = whole + (cast + summed) * size.root + 4 * weights / shares
    return round(states / shares + max(step, last))


# How long a step takes on a cluster that one has not rented yet: a roofline with one measured number.
#
# device    products at the device's FLOP/s, everything else at the speed of its memory     / efficiency
# host      beginning each operation, small ones as long as large ones                      / efficiency
# links     ring all-gather and reduce-scatter of weights and gradients
# step      on GPUs the longer of device and host, beside links: the longer of both, and of the shorter one the part that
# belongs to one block, which has nothing to hide behind; on CPUs, where the same cores do all, the sum
#
# A kernel is limited by arithmetic or by memory (Williams, Waterman and Patterson, "Roofline", CACM 2009), and kernels
# run one after the other: so their times add up. A ring of n moves (n - 1) / n of the bytes over each link (Patarasuk
# and Yuan, "Bandwidth optimal all-reduce", 2009), and the slowest link counts: between nodes that of a node, which its
# devices share.

ASSUMED_EFFICIENCY = 0.62
"""Where nothing was measured: on one H200 models of 125M, of 1.3B and of 8B's shape had 0.59, 0.66 and 0.64, from the tokens/s
in benchmarks/RESULTS.md."""
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
