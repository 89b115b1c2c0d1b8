"""Checkpoint files: written, indexed, read, checked, exported."""
