"""The Python API: prepare, train, sample, sweep, label, queue, drill. Layer rule: only this package combines all other
packages."""
