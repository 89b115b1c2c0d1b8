"""The Backend on Ray, on the driver's side: poll and execute, aggregation, drills, attaching
to a run."""
