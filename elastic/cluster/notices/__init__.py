"""Notices of a node's end: who watches for them, and how they are merged."""
