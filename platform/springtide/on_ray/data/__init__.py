"""Ray Data: the feed of training and the parallel map of a prepare."""
