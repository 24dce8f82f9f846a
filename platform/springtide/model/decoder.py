"""A decoder: RMSNorm, rotary positions, grouped-query attention, a gated feed-forward. With suitable options it computes the
same as a Llama, a Mistral, a Qwen, a Gemma, an OLMo or a Phi.

Shape suffixes: B rows, L positions, D width, H query heads, K key/value heads, E head width, F hidden width, V token ids.
The model does not depend on ranks.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from springtide.config.engine import BLOCK_OUTPUTS, ModelConfig
from springtide.errors import ConfigError, explain, look_up
from springtide.model.adapter import adapt
from springtide.model.attention import Attention, KVCache, LayerKVCache, Linear, RMSNorm
from springtide.model.flex import BlockMask, FlexKernel, block_mask, lowest_keys
from springtide.model.frozen import as_held, hold, packed_shapes
from springtide.model.loss import PartLoss, capped, head_loss, logits, token_nats
from springtide.model.positions import document_firsts, documents, rotary_table

VOCAB_MULTIPLE = 64
"""The number of rows of the embedding is rounded up to a multiple of this, so that it shards evenly and its matmuls are
fast."""
_STD = 0.02
_INIT_ROWS = 64
"""Number of rows of a parameter whose random initial values are generated from one seed."""
_FILL_AT_ONCE = 2**22
"""Number of random initial values that are generated at a time."""

Place = tuple[Tensor, Tensor, Tensor | BlockMask | None]
"""Rotary cosines and sines at the tokens' positions, as for ``rotate``, and the tokens' attention mask."""

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": functools.partial(F.gelu, approximate="tanh"),
}
_NORMS = {"pre": (True, False), "post": (False, True), "both": (True, True)}
"""Value of ``model.norms`` -> (True if there is a norm before attention and before feed-forward, True if there is a norm after
each)."""


class FeedForward(nn.Module):
    """Gated feed-forward layer: SwiGLU or GeGLU (Shazeer, "GLU variants improve transformer", 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = look_up(_ACTIVATIONS, "model.activation", config.activation)
        self.gate = Linear(config.dim, config.ffn_dim, bias=False)
        self.up = Linear(config.dim, config.ffn_dim, bias=False)
        self.down = Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        gate_BLF = self.gate(x_BLD)
        return self.down(self.activation(gate_BLF) * self.up(x_BLD))


class Block(nn.Module):
    """Attention and feed-forward, each added to the residual stream; norms before or after them, or both."""

    def __init__(self, config: ModelConfig, window: int = 0) -> None:
        """``window``: number of tokens that a token attends to; 0: all [tokens]."""
        super().__init__()
        norms = [
            RMSNorm(config.dim, config.norm_eps, config.norm_unit_offset) if there else nn.Identity()
            for there in look_up(_NORMS, "model.norms", config.norms) * 2
        ]
        self.attention_norm, self.attention_out_norm, self.ffn_norm, self.ffn_out_norm = norms
        self.attention, self.ffn = Attention(config, window), FeedForward(config)

    def forward(
        self,
        x_BLD: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | BlockMask | None = None,
        kept: LayerKVCache | None = None,
    ) -> Tensor:
        found_BLD = self.attention(self.attention_norm(x_BLD), cos, sin, mask, kept)
        x_BLD = x_BLD + self.attention_out_norm(found_BLD)
        return x_BLD + self.ffn_out_norm(self.ffn(self.ffn_norm(x_BLD)))


class Decoder(nn.Module):
    """Token ids (B, L) -> logits (B, L, V). V is ``model.vocab_size``; if that is 0, V is ``vocab_size`` rounded up to a
    multiple of 64."""

    computes_loss = True
    """True: if ``forward`` gets targets, it computes the loss itself, without holding all logits at once."""

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        eos_id: int | None = None,
        bos_id: int | None = None,
        whole_documents: bool = False,
    ) -> None:
        """``eos_id``: the id that ends a document; None if documents of one row may attend to each other. ``bos_id``: the id
        that begins a document; None if ``eos_id`` also begins documents. ``whole_documents``: True if no document continues in
        another row (see ``positions.documents``). Raises ConfigError if ``model.vocab_size`` is set (not 0) and less than
        ``vocab_size``."""
        super().__init__()
        if config.vocab_size and config.vocab_size < vocab_size:
            limit = f"has no row for each of the {vocab_size} ids of the dataset"
            remedy = "prepare it with the tokenizer of the weights, or use 0 for a model that begins at random"
            raise ConfigError(explain("model.vocab_size", config.vocab_size, limit, remedy))
        self.config, self.vocab_size, self.eos_id = config, vocab_size, eos_id
        self.whole_documents = whole_documents
        self.bos_id = eos_id if bos_id is None else bos_id
        self.padded_vocab_size = config.vocab_size or -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        self.computes_in: torch.dtype | None = None
        """Dtype of activations and matrix products; None: the dtype of the weights."""
        self.flex: FlexKernel | None = None
        self.fused_loss: PartLoss | None = None
        """Compiled ``loss.part_loss``; None: the head's loss is computed by separate, uncompiled operations."""
        rows = torch.empty(self.padded_vocab_size, config.dim)
        # on the meta device use from_pretrained: nn.Embedding would initialize values that do not exist, and import torch's
        # compiler for it
        self.embedding = nn.Embedding.from_pretrained(rows, freeze=False) if rows.is_meta else nn.Embedding(*rows.shape)
        self.blocks = nn.ModuleList(Block(config, config.window_of(layer)) for layer in range(config.num_layers))
        adapt(self.blocks, config)
        self.norm = RMSNorm(config.dim, config.norm_eps, config.norm_unit_offset)
        self.head = nn.Linear(config.dim, self.padded_vocab_size, bias=False)
        if config.base_precision != "fp32":
            hold(self.embedding, "bf16")
            hold(self.head, "bf16")
        self.tie()
        # rotary tables can be computed from the config, so they are not stored in checkpoints
        self.cos: Tensor
        self.sin: Tensor
        self.local_cos: Tensor | None
        self.local_sin: Tensor | None
        self.short_cos: Tensor | None
        self.short_sin: Tensor | None
        for table in ("cos", "sin", "local_cos", "local_sin", "short_cos", "short_sin"):
            self.register_buffer(table, None, persistent=False)

    def forward(
        self,
        tokens_BL: Tensor,
        targets_BL: Tensor | None = None,
        z_weight: float = 0.0,
        past: KVCache | None = None,
        by_token: bool = False,
        newest: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits (B, L, V) for ids (B, L). ``past``: cache of the text before the ids. ``newest``: return the logits of
        each row's last id only, (B, 1, V). ``targets_BL``: return the result of ``head_loss`` instead of logits; with
        ``by_token`` the loss of each token, (B, L), from ``token_nats``."""
        x_BLD, head_VD = self._embedded(tokens_BL)
        if self.config.scaled_embedding:
            x_BLD = x_BLD * math.sqrt(self.config.base_width or self.config.dim)
        in_global, in_local = self._places(tokens_BL, past)
        for layer, block in enumerate(self.blocks):
            cos, sin, mask = in_local if self.config.window_of(layer) else in_global
            x_BLD = block(x_BLD, cos, sin, mask, past.blocks[layer] if past else None)
        if newest:
            # keep the last position only: the logits of a long text would take more memory than its cached keys and values
            x_BLD = x_BLD[:, -1:]
        x_BLD = self.norm(x_BLD)
        if self.config.width_multiplier != 1.0:
            # divide the hidden states, not the logits: the result is the same, and there are fewer hidden states
            x_BLD = x_BLD / self.config.width_multiplier
        if targets_BL is None:
            return capped(logits(x_BLD, head_VD), self.config.logit_cap)
        hidden_ND, wanted_N = x_BLD.flatten(0, 1), targets_BL.flatten()
        if by_token:
            return token_nats(hidden_ND, head_VD, wanted_N, self.config.logit_cap).view_as(targets_BL)
        return head_loss(hidden_ND, head_VD, wanted_N, z_weight, self.config.logit_cap, self.fused_loss)

    def _embedded(self, tokens_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Return the embeddings of the ids, (B, L, D), and the head's weight, both in the compute dtype. If head and embedding
        share their weight, it is converted only once. Then their gradients add up in the compute dtype, as under FSDP."""
        if self.computes_in is None:
            return self.embedding(tokens_BL).type_as(self.norm.weight), self.head.weight
        table_VD = self.embedding.weight.to(self.computes_in)
        tied = self.head.weight is self.embedding.weight
        # call the module, not F.embedding, so that a user's hooks on the embedding run
        x_BLD: Tensor = functional_call(self.embedding, {"weight": table_VD}, (tokens_BL,))
        return x_BLD, table_VD if tied else self.head.weight.to(self.computes_in)

    def _places(self, tokens_BL: Tensor, past: KVCache | None) -> tuple[Place, Place]:
        """Return rotary tables and attention mask of the tokens, once for global layers and once for local layers (with a
        window). The mask is None if plain causal attention suffices. FlexAttention's masks include the window of local layers;
        dense masks do not."""
        length = tokens_BL.shape[1]
        ids_BL = tokens_BL if past is None else past.append(tokens_BL)
        tables = [(self.cos, self.sin)]
        if self.short_cos is not None and self.short_sin is not None and ids_BL.shape[1] <= len(self.short_cos):
            tables = [(self.short_cos, self.short_sin)]
        if self.local_cos is not None and self.local_sin is not None:
            tables.append((self.local_cos, self.local_sin))
        if past is None and self.eos_id is None:
            places: list[Place] = [(cos[:length], sin[:length], None) for cos, sin in tables]
            return places[0], places[-1]
        no_id = -1
        ends, begins = (no_id if index is None else index for index in (self.eos_id, self.bos_id))
        masks: tuple[Tensor | BlockMask, Tensor | BlockMask]
        if past is None and self.flex is not None:
            first_BL, position_BL = document_firsts(ids_BL, ends, begins, self.whole_documents)
            whole = block_mask(first_BL)
            masks = whole, block_mask(lowest_keys(first_BL, self.config.window)) if self.config.window else whole
        else:
            padding_B = past.padding_B if past else None
            position_BL, mask_B1LL = documents(ids_BL, ends, begins, length, padding_B, self.whole_documents)
            masks = mask_B1LL, mask_B1LL
        rows = [(cos[position_BL].unsqueeze(1), sin[position_BL].unsqueeze(1)) for cos, sin in tables]
        return (*rows[0], masks[0]), (*rows[-1], masks[1])

    def attend_by(self, kernel: FlexKernel | None) -> None:
        """Set how documents of a row are masked from each other: by the FlexAttention ``kernel``, or by dense masks if it is
        None. With a cache of keys and values (``past``) masks are always dense."""
        self.flex = kernel
        for module in self.modules():
            if isinstance(module, Attention):
                module.flex = kernel

    def tie(self) -> None:
        """Let the head use the embedding's weight, if the config ties them (``model.tied_head``)."""
        if self.config.tied_head:
            self.head.weight = self.embedding.weight

    def place(self, device: torch.device, weights: torch.device | None = None) -> None:
        """Replace meta tensors by tensors on ``device``. If the device ``weights`` is given, parameters go there instead.
        Rotary tables get their values; the weights stay uninitialized."""
        # do not use nn.Module.to_empty: it swaps tensors, and torch refuses to swap a fake tensor that has other references
        for module in self.modules():
            for name, parameter in module.named_parameters(recurse=False):
                empty = torch.empty_like(parameter, device=weights or device)
                setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
        self.tie()
        length = self.config.max_sequence_length
        self.cos, self.sin = rotary_table(self.config, length, device)
        if self.config.rope_scaling == "longrope" and length > self.config.rope_original_length:
            self.short_cos, self.short_sin = rotary_table(self.config, self.config.rope_original_length, device)
        if self.config.window and self.config.global_every:
            self.local_cos, self.local_sin = rotary_table(self.config, length, device, local=True)


def skeleton(
    config: ModelConfig,
    vocab_size: int,
    eos_id: int | None = None,
    bos_id: int | None = None,
    whole_documents: bool = False,
) -> Decoder:
    """Return the decoder on the meta device: shapes and names of all weights, but no memory."""
    with torch.device("meta"):
        return Decoder(config, vocab_size, eos_id, bos_id, whole_documents)


def build(
    config: ModelConfig,
    vocab_size: int,
    eos_id: int | None = None,
    bos_id: int | None = None,
    whole_documents: bool = False,
) -> Decoder:
    """Return the decoder with its initial weights, on the CPU."""
    model = skeleton(config, vocab_size, eos_id, bos_id, whole_documents)
    model.place(torch.device("cpu"))
    packed = packed_shapes(model)
    for name, parameter in model.named_parameters():
        fill(parameter, config, name, packed.get(name, tuple(parameter.shape)), 0)
    return model


@torch.no_grad()
def fill(held: Tensor, config: ModelConfig, name: str, shape: tuple[int, ...], begin: int) -> None:
    """Fill rows of a parameter with their initial values, about ``_FILL_AT_ONCE`` numbers at a time.

    Args:
        held: the rows to fill, in their stored dtype; uint8 holds packed 4-bit weights.
        config: the model's config.
        name: the parameter's name.
        shape: shape of the whole parameter before packing.
        begin: index of the first row of ``held`` within the whole parameter.
    """
    at_once = max(1, _FILL_AT_ONCE // math.prod(shape[1:]) // _INIT_ROWS) * _INIT_ROWS
    first, end = begin, begin + len(held)
    while first < end:
        # cut at multiples of _INIT_ROWS: the rows of one seed are generated together, so another cut would generate some rows
        # twice
        last = min(end, first - first % at_once + at_once)
        held[first - begin : last - begin].copy_(as_held(initial(config, name, shape, first, last), held.dtype))
        first = last


def initial(config: ModelConfig, name: str, shape: tuple[int, ...], begin: int, end: int) -> Tensor:
    """Return rows [begin, end) of a parameter's initial value, fp32. The value depends only on the config, the name and the
    row. So every rank generates only its own rows, and the parameter is the same at any world size.

    Weights are normally distributed. Output matrices of residual branches are scaled by depth (Radford et al., GPT-2, 2019),
    matrices of blocks by ``width_multiplier``. Norms start as identities, biases at zero. An adapter's matrix A is uniform
    within +-1 / sqrt(inputs), as in PEFT, and its matrix B is zero.
    """
    if name.endswith(".lora_b"):
        return torch.zeros(end - begin, *shape[1:])
    if len(shape) == 1:
        scale = 0.0 if name.endswith("bias") or config.norm_unit_offset else 1.0
        return torch.full((end - begin,), scale)
    std = _STD / math.sqrt(2 * config.num_layers) if name.endswith(BLOCK_OUTPUTS) else _STD
    if name.startswith("blocks."):
        std /= math.sqrt(config.width_multiplier)
    first, last = begin // _INIT_ROWS, -(-end // _INIT_ROWS)
    rows = torch.empty((last - first) * _INIT_ROWS, *shape[1:])
    for block in range(first, last):
        key = hashlib.blake2b(f"{config.init_seed}/{name}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
        drawn = rows[(block - first) * _INIT_ROWS :][:_INIT_ROWS]
        if name.endswith(".lora_a"):
            drawn.uniform_(-(shape[1] ** -0.5), shape[1] ** -0.5, generator=generator)
        else:
            drawn.normal_(0.0, std, generator=generator)
    return rows[begin - first * _INIT_ROWS : end - first * _INIT_ROWS]


# The cost of a model: number of parameters, and floating-point operations per token.


def flops_per_token(model: nn.Module, sequence_length: int) -> float:
    """Return the model FLOPs to train on one token, forward and backward.

    A weight in a matmul costs 6 FLOPs, or 4 if it is frozen. The head is counted, the embedding's look-up is not. In each
    layer, attention's two matmuls cost 12 * width of all heads * mean number of attended keys (Chowdhery et al., PaLM, 2022,
    appendix B, but without the scores that the causal mask and windows skip). The attention of a user's own model is unknown
    and not counted.
    """
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matmul = sum(_flops(p, n) for p, n in _counted(model) if p.dim() >= 2 and id(p) not in looked_up)
    if not isinstance(model, Decoder):
        return matmul
    config = model.config
    if config.tied_head:
        matmul += _flops(model.head.weight, model.head.weight.numel())
    return matmul + 12.0 * _attended(config, sequence_length) * config.num_heads * config.head_width


def _flops(weight: Tensor, count: int) -> float:
    """Return the FLOPs of ``count`` weights per token: the forward product, the gradient of the input and, if the weights
    train, the gradient of the weights."""
    return (6.0 if weight.requires_grad else 4.0) * count


def _counted(model: nn.Module) -> Iterator[tuple[nn.Parameter, int]]:
    """Yield each parameter with its number of weights. A parameter packed to 4 bits holds more weights than it has elements."""
    packed = packed_shapes(model)
    for name, parameter in model.named_parameters():
        yield parameter, math.prod(packed.get(name, parameter.shape))


def _attended(config: ModelConfig, sequence_length: int) -> float:
    """Return the mean number of tokens that a token attends to, summed over all layers."""
    windows = (min(config.window_of(layer) or sequence_length, sequence_length) for layer in range(config.num_layers))
    return sum(window - window**2 / (2 * sequence_length) for window in windows)


def hardware_flops_per_token(model: nn.Module, sequence_length: int, recompute: str) -> float:
    """Return the FLOPs that a device executes per token of training: the model FLOPs, plus a second forward of the blocks if
    ``recompute`` is "full" ("selective" recomputes little). Not counted: the masked half of attention, and recomputation inside
    fused kernels (Korthikanti et al., "Reducing activation recomputation", 2022)."""
    flops = flops_per_token(model, sequence_length)
    blocks = getattr(model, "blocks", None)
    if recompute != "full" or blocks is None:
        return flops
    again = 2.0 * sum(count for p, count in _counted(blocks) if p.dim() >= 2)
    if isinstance(model, Decoder):
        config = model.config
        again += 4.0 * _attended(config, sequence_length) * config.num_heads * config.head_width
    return flops + again


def num_parameters(model: nn.Module) -> int:
    """Return the number of parameters. Parameters that modules share are counted once."""
    return sum(count for _, count in _counted(model))
