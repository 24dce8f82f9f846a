"""Positions of tokens: rotary tables, and where the documents of a row begin and end.

Shape suffixes: as in ``decoder``; R: number of features of a head that are rotated.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from springtide.config.engine import ModelConfig
from springtide.errors import ConfigError, explain

_YARN_FAST, _YARN_SLOW = 32.0, 1.0


def rotary_table(
    config: ModelConfig, length: int, device: torch.device | None = None, local: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of rotary positions, fp32 (length, R / 2) each (Su et al., "RoFormer", 2021). ``local``:
    True for the local layers (with a window) of a model that also has global layers. LongRoPE (Ding et al., 2024, as in Phi 3)
    has two tables: if ``length`` is above ``rope_original_length``, the table for long rows is returned."""
    width, sharpened = config.rotary_width, 1.0
    theta = config.local_rope_theta or config.rope_theta if local else config.rope_theta
    rates = theta ** (-torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    if local:
        pass  # do not scale local layers: in a longer context, their window stays as long as before
    elif config.rope_scaling == "linear":
        rates = rates / config.rope_factor
    elif config.rope_scaling == "yarn":
        kept = 1.0 - _yarn_ramp(config, device)
        rates = kept * rates + (1.0 - kept) * rates / config.rope_factor
        # this factor scales cosines and sines, so the scores of queries and keys are scaled by its square
        sharpened = config.rope_attention_factor or 0.1 * math.log(config.rope_factor) + 1.0
    elif config.rope_scaling == "longrope":
        factors = config.rope_long_factors if length > config.rope_original_length else config.rope_short_factors
        rates = rates / torch.tensor(factors, device=device)
        sharpened = config.rope_attention_factor or 1.0
    elif config.rope_scaling == "llama3":
        # turns: number of full rotations of each frequency within the original length. If turns is between low and high,
        # interpolate between the scaled and the unscaled frequency (Llama 3.1, 2024)
        turns = config.rope_original_length * rates / (2 * math.pi)
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        rates = kept * rates + (1.0 - kept) * rates / config.rope_factor
    elif config.rope_scaling != "none":
        raise ConfigError(
            explain("model.rope_scaling", config.rope_scaling, "is not a scaling that is computed here", "use none")
        )
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * rates
    return angles.cos() * sharpened, angles.sin() * sharpened


def _yarn_ramp(config: ModelConfig, device: torch.device | None) -> Tensor:
    """Return how much YaRN stretches each wavelength, fp32 (R / 2,): 0 means unchanged, 1 stretched by the full factor. The
    result is 0 for wavelengths with at least ``_YARN_FAST`` turns within the original length, and 1 for those with at most
    ``_YARN_SLOW`` turns (Peng et al., "YaRN", 2023). As in published models, both limits are rounded to whole dimensions."""
    width, length = config.rotary_width, config.rope_original_length

    def dimension(turns: float) -> float:
        return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = max(math.floor(dimension(_YARN_FAST)), 0), min(math.ceil(dimension(_YARN_SLOW)), width - 1)
    index = torch.arange(width // 2, dtype=torch.float32, device=device)
    return ((index - low) / max(high - low, 0.001)).clamp(0.0, 1.0)


def rotate(x_BHLE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (e, e + R / 2) of the first R features by the angle of its position. ``cos``, ``sin``: tables of shape
    (L, R / 2) or (B, 1, L, R / 2)."""
    first, second, *others = x_BHLE.split(cos.shape[-1], dim=-1)
    cos, sin = cos.type_as(x_BHLE), sin.type_as(x_BHLE)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, *others], dim=-1)


def document_begins(
    tokens_BL: Tensor, eos_id: int, bos_id: int, are_whole: bool = False, padding_B: Tensor | None = None
) -> Tensor:
    """Return a mask of the tokens that begin a document, bool (B, L). The first token after the padding always begins one. The
    arguments are those of ``documents``."""
    is_eos_BL = tokens_BL == eos_id
    opens_BL = (tokens_BL == bos_id) & F.pad(is_eos_BL[:, :-1], (1, 0), value=True)
    if padding_B is not None:
        is_first_BL = torch.arange(tokens_BL.shape[1], device=tokens_BL.device) == padding_B[:, None]
        # a bos_id right after the padding, or at the start of a row, begins a document, even if bos_id equals eos_id
        opens_BL = opens_BL | is_first_BL & (tokens_BL == bos_id)
    follows_BL = F.pad((is_eos_BL & ~opens_BL)[:, :-1], (1, 0), value=False)
    begins_BL = opens_BL if are_whole else opens_BL | follows_BL
    return begins_BL if padding_B is None else begins_BL | is_first_BL


def document_firsts(
    tokens_BL: Tensor, eos_id: int, bos_id: int, are_whole: bool = False, padding_B: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return, for each token, the index in the row at which its document begins, and its position in the document, int64 (B, L)
    each. The arguments are those of ``documents``."""
    index_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
    begins_BL = document_begins(tokens_BL, eos_id, bos_id, are_whole, padding_B)
    if are_whole and bos_id == eos_id:  # here bos_id only separates documents: a document begins after it
        is_separator_BL = begins_BL & (tokens_BL == eos_id)
        begins_BL = begins_BL | F.pad(is_separator_BL[:, :-1], (1, 0), value=False)
    first_BL = torch.where(begins_BL, index_L, 0).cummax(dim=1).values
    return first_BL, index_L - first_BL


def documents(
    tokens_BL: Tensor,
    eos_id: int,
    bos_id: int,
    newest: int = 0,
    padding_B: Tensor | None = None,
    are_whole: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the position of each token in its own document, int64 (B, L), and the attention mask, bool (B, 1, L, L).

    A document begins with ``bos_id`` and ends with ``eos_id``, which may be the same id. A document that was cut continues in
    the next row without a ``bos_id``. In a row that begins inside a document, positions count from the start of the row.

    Args:
        newest: return positions (B, newest) and mask (B, 1, newest, L) of only the last ``newest`` tokens; 0: of all tokens.
        padding_B: number of padding tokens at the start of each row, to which no other token attends; None: no padding.
        are_whole: True if no document continues in another row, as in datasets of chats. Then a document begins only at a
            ``bos_id`` that is at the start of the row or follows an ``eos_id``, and it may contain further ``eos_id``. If
            ``bos_id`` equals ``eos_id``, it separates documents and belongs to none of them: positions begin after it.
    """
    index_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
    first_BL, position_BL = document_firsts(tokens_BL, eos_id, bos_id, are_whole, padding_B)
    asks = slice(-newest if newest else None, None)
    together_BLL = first_BL[:, asks, None] == first_BL[:, None, :]
    return position_BL[:, asks], (together_BLL & (index_L[asks, None] >= index_L)).unsqueeze(1)
