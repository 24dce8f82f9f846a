"""Optimizers, schedules of the learning rate, averages of the weights. Layer rule: what an update is, never when.

The state of an optimizer is sharded as its weights are, and its updates are bit-equal however it is cut.
"""
