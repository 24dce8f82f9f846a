"""What people call: train, sweep, drill, simulate, estimate. The only place where all packages meet."""
