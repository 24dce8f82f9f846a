"""A run's folder: find, open, verify, control. Layer rule: training code writes with checkpoint and tracking instead."""
