"""Optimizers, learning rate schedules, averages of the weights.

Layer rule: code here computes updates; ``training`` decides when to apply them.

Optimizer state is sharded like the weights, and updates are bit-equal for any sharding.
"""
