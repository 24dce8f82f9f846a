"""Reports of a run, made from its events. Layer rule: no report delays training; ``events.metrics`` lists the metrics."""
