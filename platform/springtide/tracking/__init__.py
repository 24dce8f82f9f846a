"""Reports of a run, made from its events. Layer rule: it never delays training; ``events.metrics`` lists the metrics."""
