"""What people call: train, sweep, drill, simulate, estimate. Layer rule: the only place where all packages meet."""
