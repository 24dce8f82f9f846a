"""Diagonal empirical Fisher information F: how much the loss on a text grows when each weight changes.

    for each row of the text: square the gradient of the row's summed cross-entropy
    F = sum of the squares over all rows / number of tokens

Near the weights w0, the loss per token then grows by about 1/2 sum of F * (w - w0)^2 (Kirkpatrick et al., "Overcoming
catastrophic forgetting in neural networks", 2017). F is empirical because its tokens come from the text: they are not sampled
from the model (Kunstner, Hennig and Balles, "Limitations of the empirical Fisher approximation", 2019).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from springtide.checkpoint.adapters import is_adapter
from springtide.checkpoint.format import read_manifest
from springtide.checkpoint.load import load
from springtide.checkpoint.retention import note_reader
from springtide.config import Config
from springtide.config.steps import StepsDone
from springtide.errors import ConfigError, explain
from springtide.model import whole
from springtide.shards import TRAIN, signed
from springtide.storage import Folder
from springtide.stream import Data, open_data
from springtide.training.anchor import trained, what_is_bad
from springtide.training.losses import loss_mask, row_losses


def fisher_of_checkpoint(
    run: Folder, name: str, config: Config, num_tokens: int, field: str
) -> tuple[dict[str, Tensor], int]:
    """Return the Fisher information of a committed checkpoint on the training text of ``config``, and the number of tokens.

    ``field``: name of a setting, for error messages about this text. Raises the errors of ``fisher_information``; also
    ConfigError if the text was prepared with another tokenizer, and CheckpointError if bytes of the checkpoint are damaged."""
    manifest, data = read_manifest(run, name), open_data(config.data)
    if manifest.meta.tokenizer_digest not in ("", data.tokenizer_digest):
        problem = f"has another tokenizer than {name}, {data.tokenizer_digest}"
        remedy = "prepare it with corpus.tokenizer = that of the run's dataset"
        raise ConfigError(explain(field, data.corpora[0].url, problem, remedy))
    model = whole(config.model, data.vocab_size, *data.document_ids)
    with note_reader(run, name):
        load(run, name, model, manifest=manifest)
    return fisher_information(model, training_rows(data, manifest.meta.step, num_tokens))


def fisher_information(model: nn.Module, rows: Iterator[Tensor]) -> tuple[dict[str, Tensor], int]:
    """Return the Fisher information of each trainable weight of ``model``, by name, fp32, and the number of tokens used.

    Args:
        model: the whole model, not sharded. Its adapters are skipped.
        rows: rows of token ids, int64 (L + 1,) each. A token that the loss ignores is ``~id``, a negative number
            (``shards.signed``).

    Raises:
        ConfigError: no token of the rows is predicted, or a gradient is not finite.
    """
    parameters = {name: one for name, one in trained(model).items() if not is_adapter(name)}
    found = {name: torch.zeros_like(one, dtype=torch.float32) for name, one in parameters.items()}
    num_tokens = 0
    model.eval()
    for row in rows:
        rows_BL = row[None].to(next(model.parameters()).device)
        num_tokens += int(loss_mask(rows_BL).sum())
        total, _ = row_losses(model, rows_BL)
        total.backward()
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                found[name].addcmul_(parameter.grad.float(), parameter.grad.float())
        model.zero_grad(set_to_none=True)
    if not num_tokens:
        raise ConfigError(explain("tokens", num_tokens, "the loss predicts no token of these rows", "use other text"))
    for name, squares in found.items():
        squares.div_(num_tokens)
        if bad := what_is_bad(squares):
            raise ConfigError(explain("fisher", name, f"has {bad}", "check the loss of this checkpoint"))
    return found, num_tokens


def training_rows(data: Data, done: StepsDone, num_tokens: int) -> Iterator[Tensor]:
    """Yield rows with about ``num_tokens`` tokens of the training text, int64 (L + 1,) each, no row twice.

    Each corpus gets the share of tokens that it has in the data mixture at the last of the ``done`` steps. The rows of a corpus
    are spread evenly over it."""
    shares, num_rows = data.shares(done), math.ceil(num_tokens / data.sequence_length)
    for corpus, reader in zip(data.corpora, data.splits(TRAIN), strict=True):
        if share := shares.get(corpus.name):
            count = min(corpus.rows, max(1, round(share * num_rows)))
            for row in np.arange(count) * corpus.rows // count:
                yield torch.from_numpy(signed(reader.read(np.array([row])).tokens)[0])
