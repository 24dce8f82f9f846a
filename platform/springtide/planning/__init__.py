"""Predict the memory, time and cost of a run, also on spot nodes. Rule: nothing is started.

The package is not named ``plan``, because that is the name of the function.
"""
