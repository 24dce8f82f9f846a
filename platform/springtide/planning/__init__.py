"""Predict the memory, time and cost of a run, also on spot nodes. Rule: no code here starts a run or a node.

The package is not named ``plan``, because the function ``springtide.plan`` has that name.
"""
