"""Notices of preemption: who watches each node for them, and how those of several sources become
one per node."""
