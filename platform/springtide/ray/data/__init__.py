"""Ray Data pipelines: the feed, which reads a rank's training batches, and the parallel map that prepares datasets."""
