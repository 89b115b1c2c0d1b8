"""One worker from idle to its end: prepare, enter a generation, step, quiesce; a
sample's loss on both sides of a transition."""
