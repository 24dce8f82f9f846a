"""The data of a run as a function: from a seed and a step to the rows of that step, equal at any world size. Rule: the data
state of a run is one integer, the next step. Everything else is computed from it. Rows are divided among the ranks last."""

from springtide.stream.batches import batches
from springtide.stream.chain import digest
from springtide.stream.data import Data, open_data
from springtide.stream.order import Order
from springtide.stream.reader import Batch, RankReader, Read, ahead, check, load

__all__ = ["Batch", "Data", "Order", "RankReader", "Read", "ahead", "batches", "check", "digest", "load", "open_data"]
