"""A run's folder: find, open, verify, control. Layer rule: training writes by checkpoint and tracking, not by this package."""
