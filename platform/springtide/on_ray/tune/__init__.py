"""Ray Tune: trials, schedulers and the workers that trials share."""
