"""Fault points: the named places of a run at which a drill injects a fault. Layer rule: imports nothing, and does nothing
unless a drill has armed it; what happens at a point is the drill's business."""

from springtide.faults.points import POINTS, Point, When, arm, armed, reach

__all__ = ["POINTS", "Point", "When", "arm", "armed", "reach"]
