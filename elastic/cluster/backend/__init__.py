"""The Backend on Ray, on the driver's side: poll and execute, aggregation, checkpoint commit,
drills, attaching to a run."""
