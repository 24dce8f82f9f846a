"""Decisions as values. Law: no I/O, no clock of its own, no torch; what a room does with a decision is its own affair."""

from springtide.elastic.geometry import micro_batches

__all__ = ["micro_batches"]
