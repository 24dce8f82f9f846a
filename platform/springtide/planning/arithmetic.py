"""Predict the device memory and the duration of a step by arithmetic, which takes milliseconds. In contrast,
``planning/step_memory.py`` runs the step on tensors without memory, takes seconds and needs torch. Tests compare the results.

    between steps     shards of weights, gradients and moments
    in a step         + gathered weights (with zero3 of one block, else of all blocks), activations, logits of some of the
                      tokens, unsharded gradients
"""

from __future__ import annotations

import math
from typing import NamedTuple

from springtide.config import Config
from springtide.config.cluster_file import NodeType
from springtide.config.engine import ModelConfig, OptimConfig
from springtide.elastic.group_sizes import most_lanes

_VOCAB_MULTIPLE = 64
_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_MOMENTS = {"fp32": 8.0, "bf16": 4.0, "int8": 2.0}
_LOGITS_AT_ONCE = {False: 2**22, True: 2**27}
"""Whether the device is a GPU -> number of logits that are computed at a time, as in ``model/loss.py``."""


class ModelSize(NamedTuple):
    """Numbers of weights of a decoder, and its attention span, from which its FLOPs follow."""

    block_matrices: int
    """Weights of one block's matrices."""
    block_vectors: int
    num_layers: int
    table: int
    """Weights of the embedding; the output head has as many."""
    tables: int
    """1 if the embedding and the output head share their weights, else 2."""
    last_norm: int
    attended: float
    """Mean number of tokens that a token attends to, summed over all layers, times the total width of the heads."""

    @property
    def block(self) -> int:
        """Number of weights of a block."""
        return self.block_matrices + self.block_vectors

    @property
    def root(self) -> int:
        """Number of weights outside the blocks."""
        return self.tables * self.table + self.last_norm

    @property
    def num_parameters(self) -> int:
        """Number of all weights, as ``model/decoder.py`` counts them."""
        return self.num_layers * self.block + self.root

    @property
    def flops_per_token(self) -> float:
        """FLOPs for a token, forward and backward, as ``model/decoder.py`` counts them."""
        return 6.0 * (self.num_layers * self.block_matrices + self.table) + 12.0 * self.attended

    def hardware_flops_per_token(self, recompute: str) -> float:
        """Return the FLOPs for a token, including activations recomputed in backward; ``recompute``: a value of
        ``parallel.recompute``."""
        again = 2.0 * self.num_layers * self.block_matrices + 4.0 * self.attended
        return self.flops_per_token + (again if recompute == "full" else 0.0)


def model_size(model: ModelConfig, vocab_size: int, length: int) -> ModelSize:
    """Return the size of the decoder that ``model`` describes.

    Args:
        model: architecture of the decoder. ``model.source`` and adapters are ignored.
        vocab_size: number of token ids.
        length: length of a row [tokens].

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
    spared = 4.0 * matrices if optim.optimizer == "muon" else 0.0  # Muon has one moment for matrices, not two
    return _MOMENTS[optim.moments] * size.num_parameters - spared


class Activations(NamedTuple):
    """Bytes that forward keeps for backward, per token."""

    kept: float
    """Bytes that each block keeps from forward for backward."""
    again: float
    """Additional bytes that one block holds while it is recomputed."""
    around: float
    """Bytes of the hidden states before the first and after the last block."""


def activations(model: ModelConfig, recompute: str, precision: str, gpu: bool) -> Activations:
    """Return the bytes per token that a decoder keeps for backward.

    Args:
        model: architecture.
        recompute: a value of ``parallel.recompute``.
        precision: a value of ``parallel.computes_in``.
        gpu: whether the device is a GPU. There, some attention kernels need keys and values repeated for each query head, which
            takes memory.
    """
    size, width, kv_width = _BYTES[precision], model.num_heads * model.head_width, model.num_kv_heads * model.head_width
    results = 2 * width + 2 * kv_width + model.dim + 2 * model.ffn_dim  # outputs of matrix products and attention
    repeated = 2 * width if gpu and kv_width < width and (precision != "bf16" or model.attention_cap) else 0
    others = 2 * model.dim + 2 * width + 2 * model.ffn_dim + repeated
    whole = float(size * (model.dim + results + others)) + (10.0 * model.dim if size < 4 else 0.0)  # norms are in fp32
    kept = {"none": whole, "selective": size * (model.dim + results + model.dim), "full": size * model.dim}[recompute]
    return Activations(kept, whole - kept, 3.0 * size * model.dim + 4.0 * model.dim)


def predicted_step_bytes(config: Config, size: ModelSize, world_size: int) -> int:
    """Estimate the peak bytes of a step per worker, close to what ``planning/step_memory.py`` predicts. Only for decoders
    without an adapter.

    Args:
        config: settings of the run; ``train.micro_batch`` is a number.
        size: size of the run's model.
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
    shares = math.inf if gpu and parallel.offloads_parameters else shards  # offloaded shards are in host memory
    if world_size == 1 and not parallel.exact and parallel.offload == "none":
        copies = 0
        # a single worker casts weights at each use; without recomputation, it keeps the cast weights of all blocks for backward
        if cast < 4:
            kept_blocks = size.num_layers * size.block_matrices if parallel.recompute == "none" else 0
            copies = cast * (2 * size.table + kept_blocks)
        return round(states + 4 * weights + copies + max(forward, backward))
    blocks = size.block if parallel.strategy == "zero3" else size.num_layers * size.block
    whole = cast * (size.root + blocks)
    # gradients that earlier micro-batches of the step have left in memory
    if parallel.exact or parallel.strategy in ("ddp", "zero1"):
        before = float(summed * weights) if several else 0.0
    else:
        before = 4 * weights / shares + summed * size.root if several else 0.0
    if cast < 4 or (shards > 1 and parallel.strategy != "zero3"):
        forward += cast * size.table
    step = whole + before + max(forward, backward)
    last = whole + (cast + summed) * size.root + 4 * weights / shares
    return round(states / shares + max(step, last))


# Predict how long a step takes on a cluster that is not rented yet: a roofline model with one measured number, the efficiency.
#
# device    matrix products at the device's FLOP/s + everything else at its memory bandwidth     / efficiency
# host      CPU time to launch the operations, the same for small and large ones                 / efficiency
# links     ring all-gather and reduce-scatter of weights and gradients
# step      GPUs: max(device, host), the compute, overlaps with links. A step takes max(compute, links) +
#           min(compute, links) / number of blocks, because one block's part of the shorter time overlaps with nothing.
#           CPUs: device + host + links, because the same cores do everything.
#
# A kernel is limited by arithmetic or by memory (Williams, Waterman and Patterson, "Roofline", CACM 2009). Kernels run one
# after the other, so their times add up. A ring of n devices moves (n - 1) / n of the bytes over each link (Patarasuk and Yuan,
# "Bandwidth optimal all-reduce", 2009). The slowest link decides: between nodes, the devices of a node share its network link.

ASSUMED_EFFICIENCY = 0.62
"""Share of a device's stated speed that a step reaches, if no run was measured. On one H200, a model of 125M weights, one of
1.3B, and one with the shape of an 8B reached 0.59, 0.66 and 0.64, computed from the tokens/s in benchmarks/RESULTS.md."""
_BLOCK_STARTS, _FORWARD_STARTS, _OTHER_STARTS = 212, 73, 78
"""Numbers of torch operations per micro-batch: in the forward and backward of one block; in the forward of one block, which
recomputation repeats; and outside all blocks. Counted as torch dispatches them (TorchDispatchMode), views and gradients
included."""
_START_S = 14e-6
"""CPU time to launch an operation [s]. Measured on the machine of benchmarks/plan.py, with matrices so small that launches take
nearly all the time."""
_MESSAGE_S = 0.005
"""Latency of the collective of one block, in addition to the transfer of its bytes [s]. Measured with gloo on the machine of
benchmarks/plan.py, between two ranks that compute at the same time."""


class StepTime(NamedTuple):
    """Parts of the time of a step, before they overlap [s]."""

    products_s: float
    """Time of matrix products and attention, at the device's FLOP/s."""
    memory_s: float
    """Time to read and write norms, activations, logits, weights and moments, at the device's memory bandwidth."""
    links_s: float
    blocks: int
    """Number of blocks whose communication overlaps with the computation of other blocks; 0: nothing overlaps."""
    host_s: float = 0.0
    """CPU time to launch operations. The CPU launches operations ahead and does not wait for a GPU."""

    def step_s(self, efficiency: float) -> float:
        """Return the duration of a step [s].

        Args:
            efficiency: speed of device and host as a share of their stated figures; above 1 if they are faster.
        """
        device_s = self.products_s + self.memory_s
        if not self.blocks:
            return (device_s + self.host_s) / efficiency + self.links_s
        device_s = max(device_s, self.host_s) / efficiency
        return max(device_s, self.links_s) + min(device_s, self.links_s) / self.blocks

    def efficiency(self, measured_s: float) -> float:
        """Return the efficiency at which the predicted duration of a step equals ``measured_s``, found by bisection. If
        communication alone takes longer than ``measured_s``, return the upper limit of the search, 10,000."""
        low, high = 1e-4, 1e4
        for _ in range(100):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.step_s(middle) > measured_s else (low, middle)
        return low


def step_time(config: Config, size: ModelSize, node: NodeType, world_size: int) -> StepTime:
    """Predict the parts of a step's time: matrix products, memory traffic, communication, launches.

    Args:
        config: settings of the run; ``train.micro_batch`` is a number.
        size: size of the run's model.
        node: the workers' node type.
        world_size: number of workers: all workers of one or more nodes, or some workers of one node.
    """
    device, parallel, model = node.device, config.parallel, config.model
    lanes, length = config.stream.num_lanes, config.shards.sequence_length
    rows = most_lanes(lanes, world_size) * (config.stream.global_batch // lanes)
    micro_steps = -(-rows // config.train.rows_at_once)
    tokens = rows * length
    products_s = tokens * size.hardware_flops_per_token(parallel.recompute) / device.flops
    cast = _BYTES[parallel.computes_in]
    # bytes per token that operations other than matrix products read and write, in forward and backward
    width = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_width
    per_token = cast * size.num_layers * (24 * model.dim + 8 * width + 12 * model.ffn_dim)
    per_token += (12 + 2 * cast) * (size.table // model.dim)  # the softmax, in fp32
    moved = float(tokens * per_token + micro_steps * 3 * cast * size.num_parameters)
    shards = parallel.shards or world_size
    # the optimizer: gradients are clipped and read, moments and weights are read and written
    moved += 2 * (state_bytes(size, config.optim) + 8 * size.num_parameters) / (1 if parallel.exact else shards)
    links_s = _links_s(config, size, node, world_size, shards, micro_steps)
    overlaps = size.num_layers if config.elastic.gpus_per_worker else 0
    host_s = micro_steps * _host_s(config, size.num_layers)
    return StepTime(products_s, moved / device.bandwidth, links_s, overlaps, host_s)


def _host_s(config: Config, num_layers: int) -> float:
    """Return the CPU time to launch the operations of a micro-batch [s]. If blocks are compiled, only
    operations outside of them count."""
    block = _BLOCK_STARTS + (_FORWARD_STARTS if config.parallel.recompute != "none" else 0)
    return _START_S * (_OTHER_STARTS + (0 if config.parallel.compile else num_layers * block))


def _links_s(config: Config, size: ModelSize, node: NodeType, workers: int, shards: int, micro_steps: int) -> float:
    """Return the time of a step's collectives on the slowest link: gathers of weights, reductions of gradients [s]."""
    parallel, weights = config.parallel, size.num_parameters
    cast, summed = _BYTES[parallel.computes_in], 8 if parallel.exact else 4
    each = parallel.strategy == "zero3"
    # zero3 gathers weights in forward and in backward of each micro-batch; zero2 and zero3 reduce gradients once per
    # micro-batch
    gathers = 2 * micro_steps if each else 1
    reduces = micro_steps if parallel.strategy in ("zero2", "zero3") and not parallel.exact else 1
    sharded = (gathers * cast + reduces * summed) * weights
    found = 0.0
    if shards > 1:
        found += sharded * (shards - 1) / shards / _link(node, shards)
    if (copies := workers // shards) > 1:  # copies of the model all-reduce their shards' gradients
        found += 2 * summed * weights / shards * (copies - 1) / copies / _link(node, workers)
    if workers > 1 and not config.elastic.gpus_per_worker:
        found += (gathers + reduces) * size.num_layers * _MESSAGE_S
    return found


def _link(node: NodeType, members: int) -> float:
    """Return the speed of the slowest link in a ring of ``members`` devices [bytes/s]."""
    inside = float(node.links.inside or math.inf)
    between = float(node.links.between or math.inf)
    return inside if members <= node.devices else min(inside, between)
