"""The calls of users: train, sweep, drill, simulate, estimate. Layer rule: the only package that combines all others."""
