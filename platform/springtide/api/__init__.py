"""The calls of users: prepare, train, sample, sweep, label, queue, drill. Layer rule: the only one that combines all others."""
