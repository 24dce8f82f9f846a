"""Reports of a run. Layer rule: it listens to events and never delays training; one table has the metrics' names and units."""
