"""A run's folder: claimed, opened, verified. Layer rule: reads and claims; training writes through checkpoint and tracking."""
