"""Proof that a layout computes what one process does: by structure, then by values."""
