"""The config sections of the model, its distribution over workers, and the optimizer: what is trained, and how.
``config/schema.py`` explains the marks of fields, such as ``free``."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from springtide.config.quantities import Tokens
from springtide.config.section import Section, free
from springtide.errors import explain, look_up

_BF16_BETA = 0.99
"""Largest beta (decay rate) for moments in bf16. bf16 has 8 significant bits: an update of less than 1 / 256 of a moment may be
rounded away."""


BLOCK_OUTPUTS = ("attention.out.weight", "ffn.down.weight")
"""Name suffixes of the matrices whose output a block adds to the residual stream."""


_SCALED: dict[str, Literal["tensorwise", "rowwise"]] = {"fp8": "tensorwise", "fp8_rowwise": "rowwise"}
"""8-bit value of ``parallel.precision`` -> name of torchao's float8 recipe."""
_OFFLOADS = {
    "none": (),
    "activations": ("activations",),
    "parameters": ("parameters",),
    "all": ("activations", "parameters"),
}
"""Value of ``parallel.offload`` -> what it moves to host memory."""


class ModelConfig(Section):
    """A decoder. Its options cover Llama, Mistral, Qwen, Gemma, OLMo and Phi."""

    source: str = ""
    """Function that returns your own model, ``package.module:function`` (see ``springtide.model.source``); empty builds the
    decoder that the rest of this section describes [name]."""
    vocab_size: int = Field(0, ge=0)
    """Rows of the embedding and of the output head: set it to load weights with a larger vocabulary than the dataset's. 0: the
    number of ids in the dataset, rounded up to a multiple of 64 [ids]."""
    num_layers: int = Field(6, ge=1)
    """Decoder blocks [blocks]."""
    dim: int = Field(192, ge=2)
    """Width of the residual stream [features]."""
    num_heads: int = Field(6, ge=1)
    """Query heads; must divide dim, unless head_dim is given [heads]."""
    num_kv_heads: int = Field(3, ge=1)
    """Key and value heads; must divide num_heads [heads]."""
    head_dim: int = Field(0, ge=0)
    """Width of a head; 0 means dim / num_heads [features]."""
    ffn_dim: int = Field(512, ge=1)
    """Hidden width of the gated feed-forward [features]."""
    base_width: int = Field(0, ge=0)
    """``dim`` of the smaller model on which learning rate and initialisation were tuned. muP (maximal update parametrisation)
    scales learning rate and initialisation to this model's width, see ``width_multiplier``. 0: standard parametrisation
    [features]."""
    activation: Literal["silu", "gelu"] = "silu"
    """Activation of the gate: SwiGLU, or Gemma's GeGLU with the tanh approximation [name]."""
    qkv_bias: bool = False
    """Whether queries, keys and values have biases, as in Qwen 2 [flag]."""
    qk_norm: Literal["none", "head", "all_heads"] = "none"
    """Norm of queries and keys before the rotary embedding: ``none``; ``head``: of each head, as in Qwen 3; ``all_heads``: of
    all heads together, as in OLMo 2 [name]."""
    norms: Literal["pre", "post", "both"] = "pre"
    """Where a block has norms: ``pre``: before attention and feed-forward; ``post``: on their outputs, as in OLMo 2; ``both``,
    as in Gemma 2 [name]."""
    window: int = Field(0, ge=0)
    """Sliding window of local layers: the number of tokens that a token attends to, itself included; 0 makes all layers global
    [tokens]."""
    global_every: int = Field(0, ge=0)
    """With ``window``: every n-th layer is global, the others are local. 2 in Gemma 2, 4 in OLMo 3, 6 in Gemma 3; 0 makes all
    layers local, as in Mistral [blocks]."""
    attention_cap: float = Field(0.0, ge=0)
    """Soft cap c of attention scores, c tanh(score / c), as in Gemma 2; 0 is none. No fused kernel supports it, so a layer
    keeps all its scores in memory [1]."""
    logit_cap: float = Field(0.0, ge=0)
    """Soft cap c of logits, c tanh(logit / c), as in Gemma 2; 0 is none [1]."""
    score_width: int = Field(0, ge=0)
    """Attention scores are divided by the square root of this; 0 uses the width of a head [features]."""
    norm_eps: float = Field(1e-5, gt=0)
    """Added to the mean square inside RMSNorm [1]."""
    norm_unit_offset: bool = False
    """Whether norms scale by one plus their weight, which is initialised to zero, as in Gemma [flag]."""
    scaled_embedding: bool = False
    """Whether embeddings are multiplied by the square root of dim, as in Gemma [flag]."""
    tied_head: bool = True
    """Whether the output head shares the embedding's weight [flag]."""
    max_sequence_length: int = Field(2048, ge=2)
    """Longest sequence the rotary table is built for [tokens]."""
    rope_theta: float = Field(10_000.0, gt=0)
    """Base of the rotary wavelengths [1]."""
    local_rope_theta: float = Field(0.0, ge=0)
    """Base of the rotary wavelengths in local layers, as in Gemma 3; 0 is rope_theta [1]."""
    rotary_fraction: float = Field(1.0, gt=0, le=1)
    """Fraction of each head's features that is rotated, counted from the first feature; 0.75 in Phi 4 mini [ratio]."""
    rope_scaling: Literal["none", "linear", "llama3", "yarn", "longrope"] = "none"
    """How rotary wavelengths are stretched for longer sequences than in the original training: all by one factor (linear), only
    the long wavelengths (llama3; yarn, which also sharpens attention), or each by its own factor (longrope). In a model with
    global and local layers, only global layers stretch them [name]."""
    rope_factor: float = Field(8.0, ge=1)
    """Factor that wavelengths are stretched by [ratio]."""
    rope_original_length: int = Field(8192, ge=2)
    """Length of the sequences in the original training; for llama3, yarn and longrope [tokens]."""
    rope_short_factors: tuple[float, ...] = ()
    """Factor of each wavelength in rows of at most rope_original_length tokens; for longrope, as in Phi 3.5 [ratio]."""
    rope_long_factors: tuple[float, ...] = ()
    """Factor of each wavelength in rows of more than rope_original_length tokens; for longrope [ratio]."""
    rope_attention_factor: float = Field(0.0, ge=0)
    """Factor that queries and keys are multiplied by, for longrope and yarn. 0 is the usual factor: 1 for longrope; for yarn
    0.1 ln(rope_factor) + 1, as in its paper [ratio]."""
    rope_low_freq_factor: float = Field(1.0, gt=0)
    """Wavelengths longer than rope_original_length / rope_low_freq_factor are stretched fully; for llama3 [ratio]."""
    rope_high_freq_factor: float = Field(4.0, gt=0)
    """Wavelengths shorter than rope_original_length / rope_high_freq_factor are not stretched; for llama3 [ratio]."""
    init_seed: int = Field(0, ge=0)
    """Seed of the initial weights [1]."""
    adapter: Literal["none", "lora", "dora"] = "none"
    """Low-rank adapter that is trained instead of the weights, which stay frozen at their values from ``train.start_from``;
    dora also trains the norm of each row [name]."""
    adapter_rank: int = Field(8, ge=1)
    """Rank of the update that an adapter adds to a matrix; at most the smaller side of each matrix [1]."""
    adapter_alpha: float = Field(16.0, gt=0)
    """The update of an adapter is multiplied by adapter_alpha / adapter_rank, so that a learning rate that fits one rank fits
    others [1]."""
    adapter_targets: tuple[str, ...] = Field(("*",), min_length=1)
    """Patterns of the names of the blocks' matrices that get an adapter, such as ``*.attention.*``; ``*`` is all [name]."""
    base_precision: Literal["fp32", "bf16", "nf4"] = "fp32"
    """Type in which the frozen weights under an adapter are stored. nf4, as in QLoRA: 4 bits per weight of the blocks'
    matrices, bf16 for embedding and head. Matrix products are computed in parallel.precision [type]."""

    @property
    def head_width(self) -> int:
        """Width of a head [features]."""
        return self.head_dim or self.dim // self.num_heads

    @property
    def rotary_width(self) -> int:
        """Features of a head that are rotated [features]."""
        return round(self.head_width * self.rotary_fraction)

    @property
    def written_length(self) -> int:
        """Longest context while generating [tokens]. LongRoPE switches to other factors beyond ``rope_original_length``, and
        cached keys would keep the old factors, so generation stays within that length."""
        most = self.max_sequence_length
        return min(most, self.rope_original_length) if self.rope_scaling == "longrope" else most

    def window_of(self, layer: int) -> int:
        """Return the attention window of block ``layer``, counted from 0; 0 if the block is global [tokens]."""
        return 0 if self.global_every and (layer + 1) % self.global_every == 0 else self.window

    @property
    def width_multiplier(self) -> float:
        """``dim`` over ``base_width``; 1 in the standard parametrisation [ratio].

        Yang et al., "Tensor Programs V" (2022), table 8, for Adam. At m times the width, the blocks' matrices have 1 / sqrt(m)
        of the initial standard deviation and 1 / m of the learning rate, and logits are divided by m. Embeddings, norms and
        biases do not change. This assumes that ffn_dim grows with dim.
        """
        return self.dim / self.base_width if self.base_width else 1.0

    @property
    def attention_scale(self) -> float | None:
        """Factor that attention scores are multiplied by; None is the usual 1 / sqrt(width of a head) [1].

        With ``base_width``, a wider model has as many heads as its base, each of them wider: the scale is 1 / width of a head,
        times a constant that makes it the usual scale at the base's width. If ``head_dim`` is set too, the wider model has more
        heads of the same width, and the scale stays at 1 / sqrt(width of a head).
        """
        if self.score_width:
            return 1.0 / math.sqrt(self.score_width)
        if self.head_dim or self.width_multiplier == 1.0:
            return None
        return math.sqrt(self.base_width // self.num_heads) / self.head_width

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        self._check_base_width()
        if self.adapter != "none" and self.source:
            problem = f"configures the built-in decoder, but model.source = {self.source!r} names a model of your own"
            raise ValueError(
                explain("model.adapter", self.adapter, problem, "make the adapter in that model, and set this to none")
            )
        if self.base_precision != "fp32" and self.adapter == "none":
            problem = "is the type of weights that are frozen, and model.adapter = 'none' trains them"
            raise ValueError(
                explain("model.base_precision", self.base_precision, problem, "set model.adapter, or set this to fp32")
            )
        if not self.head_dim and self.dim % (2 * self.num_heads):
            raise ValueError(
                explain(
                    "model.num_heads",
                    self.num_heads,
                    f"must divide model.dim = {self.dim} into even head sizes",
                    "choose dim as an even multiple of num_heads, or set model.head_dim",
                )
            )
        if self.head_dim % 2:
            raise ValueError(explain("model.head_dim", self.head_dim, "must be even", f"use {self.head_dim + 1}"))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                explain(
                    "model.num_kv_heads",
                    self.num_kv_heads,
                    f"must divide model.num_heads = {self.num_heads}",
                    "choose a divisor",
                )
            )
        rotated = self.head_width * self.rotary_fraction
        if self.rotary_width < 2 or self.rotary_width % 2 or abs(rotated - self.rotary_width) > 1e-6:
            problem = f"rotates {rotated:g} of {self.head_width} features of a head"
            raise ValueError(
                explain(
                    "model.rotary_fraction", self.rotary_fraction, problem, "choose one that rotates an even number"
                )
            )
        if (self.global_every or self.local_rope_theta) and not self.window:
            field = "global_every" if self.global_every else "local_rope_theta"
            problem = "needs local layers, and model.window = 0 makes all layers global"
            raise ValueError(
                explain(f"model.{field}", getattr(self, field), problem, "set model.window too, or set this to 0")
            )
        if self.rope_scaling == "yarn" and self.rope_theta <= 1:
            problem = "has no wavelengths that yarn could tell apart"
            raise ValueError(explain("model.rope_theta", self.rope_theta, problem, "use more than 1, such as 10000"))
        for name in ("rope_short_factors", "rope_long_factors") if self.rope_scaling == "longrope" else ():
            factors = getattr(self, name)
            if len(factors) != self.rotary_width // 2 or not all(0 < one < math.inf for one in factors):
                problem = f"is not a positive factor for each of the {self.rotary_width // 2} wavelengths"
                raise ValueError(explain(f"model.{name}", factors, problem, "copy them from the model's config.json"))
        if self.rope_high_freq_factor <= self.rope_low_freq_factor:
            raise ValueError(
                explain(
                    "model.rope_high_freq_factor",
                    self.rope_high_freq_factor,
                    f"must be more than model.rope_low_freq_factor = {self.rope_low_freq_factor:g}",
                    "Llama 3 has 1 and 4",
                )
            )
        return self

    def _check_base_width(self) -> None:
        problem = ""
        if self.base_width and self.source:
            problem = f"scales the decoder, and model.source = {self.source!r} is a model of your own"
            remedy = "use 0, and scale that model itself"
        elif self.base_width and self.score_width:
            problem = f"scales attention too, and model.score_width = {self.score_width} fixes its scale"
            remedy = "use one of the two"
        elif not self.head_dim and self.base_width % (2 * self.num_heads):
            problem = f"model.num_heads = {self.num_heads} must divide it into even head sizes"
            remedy = "use an even multiple of num_heads, or set model.head_dim to keep the size of a head"
        elif self.head_dim and self.base_width * self.num_heads % self.dim:
            problem = (
                f"has {self.num_heads * self.base_width / self.dim:.3g} heads of model.head_dim = {self.head_dim}, "
                f"where model.dim = {self.dim} has {self.num_heads}"
            )
            remedy = "choose one with a whole number of heads"
        if problem:
            raise ValueError(explain("model.base_width", self.base_width, problem, remedy))


class ParallelConfig(Section):
    """How the model is distributed over the workers, and the types it computes in."""

    strategy: Literal["ddp", "zero1", "zero2", "zero3"] = free(default="zero3")
    """How the model is sharded. ddp: not at all, each worker holds a copy. Otherwise each worker holds a shard between steps.
    During a step, zero1 holds whole weights and gradients; zero2 holds whole weights, and shards gradients after each
    micro-batch; zero3 holds whole weights of one block at a time [name]."""
    shard_workers: int = free(default=0, ge=0)
    """Workers that one copy of the model is sharded over; 0 means all. With more workers there are several copies (HSDP), and
    every world size is a multiple of this [workers]."""
    precision: Literal["fp32", "bf16", "fp16", "fp8", "fp8_rowwise"] = "fp32"
    """Type of weights and activations inside a block; master weights stay fp32. fp16 scales the loss and skips steps that
    overflow. fp8: as bf16, but the blocks' matrix products and the gathering of their weights use 8 bits, with one scale per
    tensor. fp8_rowwise: as fp8, but only the products use 8 bits, with a scale per row and column. Both fp8 types need
    springtide[fp8] and an L4, an H100 or newer [type]."""
    reduction: Literal["fp32", "fp64"] = free(default="fp32")
    """Type that gradients are summed in, over micro-batches and workers. With fp64 the sums are exact except in very rare
    cases, and each micro-batch has rows of only one lane (a fixed part of the batch). So a CPU run has the same bits at any
    world size. With fp64, gradients are not sharded [type]."""
    recompute: Literal["none", "selective", "full"] = free(default="none")
    """Activations of a block that the backward pass recomputes: none; all except matrix products and attention (selective); or
    all except the block's input (full) [name]."""
    offload: Literal["none", "activations", "parameters", "all"] = free(default="none")
    """What GPUs keep in host memory. activations: inputs of blocks; needs ``recompute: full``. parameters: shards of weights,
    gradients and optimizer state, which the CPU then updates. all: activations and parameters. Slower, for models that
    do not fit otherwise [name]."""
    compile: bool = free(default=False)
    """Whether blocks are compiled (torch.compile) [flag]."""
    threads: int = free(default=0, ge=0)
    """Intra-op CPU threads per worker; 0 leaves the choice to OMP_NUM_THREADS [threads]."""
    deterministic: bool = free(default=False)
    """Whether GPUs use deterministic kernels: the same micro-batch gives the same bits on the same kind of GPU; slower. An
    operation without such a kernel ends the run with an error that names it. CPUs are deterministic anyway [flag]."""

    @property
    def float8(self) -> Literal["", "tensorwise", "rowwise"]:
        """torchao's name for the scales of 8-bit matrix products: ``tensorwise`` is one per tensor; empty without 8-bit
        products."""
        return _SCALED.get(self.precision, "")

    @property
    def computes_in(self) -> Literal["fp32", "bf16", "fp16"]:
        """Type of activations and of gathered weights. With ``precision: fp8``, weights are gathered in 8 bits instead."""
        return "bf16" if self.precision == "fp8" or self.precision == "fp8_rowwise" else self.precision

    @property
    def offloads_parameters(self) -> bool:
        """Whether weights, gradients and moments are in host memory."""
        return "parameters" in look_up(_OFFLOADS, "parallel.offload", self.offload)

    @property
    def offloads_activations(self) -> bool:
        """Whether block inputs stay in host memory until backward."""
        return "activations" in look_up(_OFFLOADS, "parallel.offload", self.offload)

    @model_validator(mode="after")
    def _check(self) -> ParallelConfig:
        if self.offloads_activations and self.recompute != "full":
            problem = f"moves inputs of blocks, and parallel.recompute = {self.recompute!r} keeps more than these on the device"
            raise ValueError(explain("parallel.offload", self.offload, problem, "set parallel.recompute to full"))
        return self

    @property
    def exact(self) -> bool:
        """Whether sums of gradients over micro-batches and workers are exact (fp64), so that results are bit-identical at any
        world size."""
        return self.reduction == "fp64"

    @property
    def shards(self) -> int:
        """Workers that one copy of the model is sharded over: 1 with ``strategy: ddp``, 0 for all workers [workers]."""
        return 1 if self.strategy == "ddp" else self.shard_workers


class ParameterGroup(Section):
    """Optimizer settings of the parameters whose names match a pattern."""

    match: str = Field(min_length=1)
    """Pattern of parameter names: ``*`` stands for any text, ``?`` for one character, ``[0-3]`` for a digit from 0 to 3
    [name]."""
    lr_scale: float = Field(1.0, gt=0)
    """Multiplies the learning rate of the group, and so also its weight decay per step [ratio]."""
    weight_decay: float | None = Field(None, ge=0)
    """Weight decay of the group's matrices and vectors. null: optim.weight_decay for matrices, none for vectors [1]."""
    frozen: bool = False
    """Whether the group's parameters are frozen: no gradients, and no state in the optimizer [flag]."""


class OptimConfig(Section):
    """The optimizer, its schedule in tokens, and clipping."""

    source: str = ""
    """Function that returns your own optimizer, ``package.module:function`` (see ``springtide.optim.build``); empty uses
    ``optimizer`` [name]."""
    optimizer: Literal["adamw", "muon", "lamb", "adafactor"] = "adamw"
    """adamw. muon: Muon for the blocks' matrices, AdamW for all else, at the same learning rates. lamb: for very large batches.
    adafactor: small state; the learning rate is relative to each tensor's root mean square [name]."""
    moments: Literal["fp32", "bf16", "int8"] = "fp32"
    """Type of AdamW's two moments. Together they take 8 (fp32), 4 (bf16) or 2 (int8) bytes per parameter. int8 has one scale
    per 256 values of a row [type]."""
    peak_lr: float = Field(3e-3, gt=0)
    """Learning rate after warm-up [1]."""
    schedule: Literal["cosine", "linear", "wsd", "wsd_sqrt"] = "cosine"
    """Learning rate after warm-up: half a cosine (cosine), linear decay (linear), or constant with a decay at the end that is
    linear (wsd) or 1 - sqrt(progress) (wsd_sqrt) [name]."""
    warmup: Tokens = Tokens(50_000)
    """Length of the linear warm-up from zero [tokens]."""
    decay: Tokens = Tokens(0)
    """Length of the final decay. With 0, cosine and linear decay from the warm-up to the end of the run, wsd and wsd_sqrt
    in the last fifth of the run [tokens]."""
    final_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Final learning rate over peak_lr; 0 decays to zero [ratio]."""
    schedule_begin: Tokens = Tokens(0)
    """Position of this run's first step in the schedule. A second stage that continues the schedule of a first stage sets it to
    the tokens that the first stage trained on; 0 begins the schedule anew [tokens]."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moments [ratio]."""
    eps: float = Field(1e-8, gt=0)
    """Added to the square root of the second moment [1]."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay of matrices; vectors are not decayed [1]."""
    groups: tuple[ParameterGroup, ...] = ()
    """Learning rate, decay or freezing by pattern of parameter names; the first matching group applies. Example: ``[{match:
    embedding.*, weight_decay: 0}]`` decays no embeddings [table]."""
    ema_half_life: Tokens = Tokens(0)
    """Half-life of an exponential moving average of the weights. The average is saved with the state and evaluated too; 0 keeps
    no average [tokens]."""
    clip_norm: float = Field(1.0, ge=0)
    """Gradients are clipped to this global norm; 0 turns clipping off [1]."""
    on_spike: Literal["off", "warn", "skip", "rollback"] = "warn"
    """Reaction to a spike, a step whose loss or gradient norm is far above earlier steps. off: none. warn: report it. skip:
    report it and skip the update. rollback: return to the newest checkpoint before the spike, and jump over the spike's step
    [name]."""
    rollback_steps: int = Field(0, ge=0)
    """Steps before a spike that a rollback also jumps over [steps]."""
    spike_deviations: float = Field(12.0, gt=0)
    """Threshold of a spike: robust standard deviations above the median of the preceding steps [1]."""
    max_left_out: int = free(default=20, ge=0)
    """Most consecutive steps that may be skipped or jumped over because of spikes, or of infinite or NaN gradients; one more
    stops the run [steps]."""
    z_loss: float = Field(0.0, ge=0)
    """Weight, per token, of the z-loss: the squared logarithm of the softmax's denominator, which keeps logits from drifting;
    1e-4 in PaLM [ratio]."""

    @model_validator(mode="after")
    def _check(self) -> OptimConfig:
        for beta in self.betas:
            if not 0 <= beta < 1:
                raise ValueError(explain("optim.betas", self.betas, "each must be in [0, 1)", "use (0.9, 0.95)"))
        if self.moments != "fp32" and (self.optimizer != "adamw" or self.source):
            other = f"optim.{'source' if self.source else 'optimizer'} = {self.source or self.optimizer!r}"
            what = f"is the type of AdamW's moments, and {other} keeps its own"
            raise ValueError(
                explain("optim.moments", self.moments, what, "set optim.moments to fp32, or train with adamw")
            )
        if self.moments == "bf16" and max(self.betas) > _BF16_BETA:
            what = (
                f"rounds a change of 1 - {max(self.betas):g} of a moment away: optim.betas may be {_BF16_BETA} at most"
            )
            raise ValueError(
                explain("optim.moments", self.moments, what, "set optim.betas to (0.9, 0.95), or optim.moments to int8")
            )
        for index, group in enumerate(self.groups):
            if self.source and (group.lr_scale != 1.0 or group.weight_decay is not None):
                what = f"sets a rate or a decay, and optim.source = {self.source!r} makes the parameter groups"
                remedy = "set them in that function; groups may only freeze then"
                raise ValueError(explain(f"optim.groups.{index}.match", group.match, what, remedy))
        return self
