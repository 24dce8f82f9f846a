"""What a run will need: memory, time, cost, and what a spot market does to it. Layer rule: starts nothing.

The package is not named ``plan``: that is the function.
"""
