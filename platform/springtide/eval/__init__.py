"""Text that a model writes, and how likely it holds text to be. Layer rule: it trains nothing and knows no run, and a model
never reads more at once than the rows that it was trained on hold.

    sampling     logits (B, V) -> one id of each row, the same for the same seed
    writer       prompts of any lengths -> ids after them, in batches, with a cache of keys and values
    growing_text the text of a row while it is written: stop strings, what can be shown
    text_model   a checkpoint and its tokenizer: encode, decode, log-probabilities, texts
    harness      the same as lm-evaluation-harness asks for it, and scores on its tasks
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
