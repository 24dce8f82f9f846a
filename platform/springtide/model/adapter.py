"""Low-rank adapters for a decoder's matrices: LoRA (Hu et al., arXiv 2106.09685) and DoRA (Liu et al., arXiv 2402.09353).

    LoRA    W x + s B A x                      s = adapter_alpha / adapter_rank
    DoRA    m (W x + s B A x) / |W + s B A|    the norm |.| and the magnitude m have a value for each row

W is frozen. B begins at zero and m at the row norms of W, so a new adapter does not change the model's outputs.

Shape suffixes: as in ``decoder``; N tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from springtide.config.engine import ModelConfig
from springtide.errors import look_up
from springtide.model.frozen import FrozenLinear, converted, hold, product


class AdaptedLinear(FrozenLinear):
    """A linear layer with a LoRA or DoRA adapter."""

    def __init__(self, base: nn.Linear, rank: int, scale: float, with_magnitude: bool) -> None:
        """Make a layer with the shape of ``base`` and uninitialized weights."""
        super().__init__(base)
        self.scale = scale
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_b = nn.Parameter(torch.empty(base.out_features, rank))
        self.magnitude: nn.Parameter | None
        self.register_parameter("magnitude", nn.Parameter(torch.empty(base.out_features)) if with_magnitude else None)

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O)."""
        x_NI = x.flatten(0, -2)
        # addmm computes scale and sum in one pass. Separate operations would need two more passes over all outputs in forward,
        # and one more in backward
        base_NO = product(x_NI, self.weight, self.in_features)
        lora_a, lora_b = self.lora_a.to(x.dtype), self.lora_b.to(x.dtype)
        y_NO = torch.addmm(base_NO, F.linear(x_NI, lora_a), lora_b.T, alpha=self.scale)
        y = y_NO.unflatten(0, x.shape[:-1])
        if self.magnitude is not None:
            y = y * (self.magnitude.to(x.dtype) / self._norms(lora_a, lora_b)).type_as(y)
        return y if self.bias is None else y + self.bias.to(x.dtype)

    @torch.no_grad()
    def _norms(self, A_RI: Tensor, B_OR: Tensor) -> Tensor:
        """Return the norms of the rows of W + s B A, (O,). Backward treats them as constants (DoRA, section 4.3)."""
        W = converted(self.weight, self.in_features, A_RI.dtype)
        return torch.linalg.vector_norm((W + self.scale * (B_OR @ A_RI)).float(), dim=1)


@torch.no_grad()
def merged(W: Tensor, A: Tensor, B: Tensor, scale: float, magnitude: Tensor | None = None) -> Tensor:
    """Return rows of the matrix W + s B A, fp32; with DoRA each row is scaled to its magnitude.

    Args:
        W: rows of the frozen matrix, (O, I).
        A: the adapter's A, (R, I).
        B: the rows of the adapter's B with the same indices as those of W, (O, R).
        scale: adapter_alpha / adapter_rank.
        magnitude: DoRA's magnitudes for these rows of W, (O,); None for LoRA.

    Examples:
        >>> merged(torch.eye(2), torch.ones(1, 2), torch.tensor([[0.0], [1.0]]), scale=2.0)
        tensor([[1., 0.],
                [2., 3.]])
    """
    whole = W.float() + scale * (B.float() @ A.float())
    if magnitude is None:
        return whole
    return whole * (magnitude.float() / torch.linalg.vector_norm(whole, dim=1))[:, None]


def adapt(blocks: nn.ModuleList, config: ModelConfig) -> None:
    """Attach adapters, in place, to those matrices of ``blocks`` whose names match ``model.adapter_targets``. All matrices of
    ``blocks`` are then stored in ``model.base_precision``."""
    if config.adapter == "none":
        return
    scale = config.adapter_alpha / config.adapter_rank
    has_magnitude = look_up({"lora": False, "dora": True}, "model.adapter", config.adapter)
    for name, linear in list(matrices(blocks)):
        adapts = any(fnmatch.fnmatchcase(name, pattern) for pattern in config.adapter_targets)
        if not adapts and config.base_precision == "fp32":
            continue
        parent, _, last = name.removeprefix("blocks.").removesuffix(".weight").rpartition(".")
        kind = (linear, config.adapter_rank, scale, has_magnitude)
        layer = AdaptedLinear(*kind) if adapts else FrozenLinear(linear)
        if config.base_precision != "fp32":
            hold(layer, config.base_precision)
        setattr(blocks.get_submodule(parent), last, layer)


def matrices(blocks: nn.ModuleList) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers of a decoder's ``blocks``, each with the name of its weight."""
    for name, module in blocks.named_modules():
        if isinstance(module, nn.Linear):
            yield f"blocks.{name}.weight", module
