"""Plain ``nn.Module``. Law: a model knows its config and nothing of ranks, devices or files."""

from springtide.model.decoder import Decoder, build, flops_per_token, initial, num_parameters, skeleton

__all__ = ["Decoder", "build", "flops_per_token", "initial", "num_parameters", "skeleton"]
