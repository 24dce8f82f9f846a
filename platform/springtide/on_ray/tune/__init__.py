"""Ray Tune: trials, schedulers, and the worker pool that trials share."""
