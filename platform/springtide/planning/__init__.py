"""Predict the memory, time and cost of a run, also on spot nodes. Layer rule: starts nothing.

The package is not named ``plan``, because that is the name of the function.
"""
