"""Trackers that people have already (W&B, MLflow, Trackio), each in a process of its own."""
