"""The Backend on Ray: poll and execute, aggregation, checkpoint commit, drills."""
