"""One worker from idle to its end: prepare, enter a generation, step, quiesce."""
