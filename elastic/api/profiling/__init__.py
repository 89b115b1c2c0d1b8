"""What a job or a live run is measured by: hardware, steps of a run, how a job scales."""
