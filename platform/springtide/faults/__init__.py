"""Fault points: the named places of a run at which a test injects a fault. Layer rule: imports nothing, and does nothing unless
armed. What happens at a point is the test's business: ``tests/programs/fault_points``."""

from springtide.faults.points import POINTS, Point, When, arm, armed, reach

__all__ = ["POINTS", "Point", "When", "arm", "armed", "reach"]
