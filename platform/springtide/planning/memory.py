"""Predict what a worker's device holds in a step, by arithmetic: in milliseconds, where ``planning/step_memory.py``, which
runs the step on tensors without memory, takes seconds and needs torch. Tests hold the two together.

    between steps     weights, gradients, moments: sharded
    in a step         + whole weights (of all, or of two blocks), activations, logits of a part of the tokens, whole gradients
"""

from __future__ import annotations

import math
from typing import NamedTuple

from springtide.config import Config
from springtide.config.engine import ModelConfig, OptimConfig

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
        """All weights, as ``model/flops.py`` counts them."""
        return self.num_layers * self.block + self.root

    @property
    def flops_per_token(self) -> float:
        """FLOPs for a token, forward and backward, as ``model/flops.py`` counts them."""
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
        >>> from springtide.planning.memory import model_size
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
