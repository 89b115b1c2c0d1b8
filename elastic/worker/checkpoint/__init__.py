"""Checkpoint files: written and committed by a marker (checkpoint_writer.py), indexed, read,
checked, exported."""
