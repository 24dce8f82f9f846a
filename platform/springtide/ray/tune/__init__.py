"""Ray Tune: trials, schedulers, and the worker pool that trials share. Only ``trial``, ``schedulers`` and ``tuner`` import
Tune."""
