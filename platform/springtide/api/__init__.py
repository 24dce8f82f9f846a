"""The Python API: prepare, train, sample, sweep, label, queue, drill. Layer rule: the only package that combines all others."""
