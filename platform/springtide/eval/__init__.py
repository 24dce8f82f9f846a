"""Text generation, and log-probabilities of given text. Layer rule: this package trains nothing and does not depend on
runs. A model never reads more tokens at once than a row of its training data holds.

    sampling     logits (B, V) -> one id for each row, the same for the same seed
    writer       prompts of any lengths -> token ids that continue the prompts, in batches, with a KV cache
    text_model   a checkpoint and its tokenizer: encode, decode, log-probabilities, generate; text that grows as ids arrive
    harness      adapter for lm-evaluation-harness, and scores on its tasks
"""

from springtide.eval.sampling import Sampling
from springtide.eval.text_model import Answer, TextModel, open_checkpoint, open_export
from springtide.eval.writer import write

__all__ = [
    "Answer",
    "Sampling",
    "TextModel",
    "open_checkpoint",
    "open_export",
    "write",
]
