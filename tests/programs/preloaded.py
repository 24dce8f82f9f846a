"""Imported once by the server that forks the ranks: what every rank would otherwise import or measure again.

Measured on two cores: a fork with its process group takes 0.1 s. The peak FLOP/s of the device takes 0.3 s, more than five
steps of the tiny model.
"""

import loops  # noqa: F401
import numpy.ma  # noqa: F401
import saving  # noqa: F401
import torch
import torch._dynamo
import torch.distributed.checkpoint

from springtide.training.device import peak_flops

torch.set_num_threads(1)  # a thread would not survive the fork
peak_flops(torch.device("cpu"))
