"""A space, a trial, a verdict. Law: no Ray here; a space is checked against the config's own types before anything runs."""

from springtide.sweep.space import Range, read_space

__all__ = ["Range", "read_space"]
