"""Faults of a real run on a local cluster, at its fault points (``springtide.faults``): the named places where a process waits
until a fault has been injected. ``python -m fault_points`` runs one fault at each point, or a storm of faults at random."""
