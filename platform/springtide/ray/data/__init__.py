"""Ray Data: the feed of training, and the parallel map that prepares datasets."""
