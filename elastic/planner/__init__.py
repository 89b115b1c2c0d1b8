"""Which layout on which nodes. Sees numbers only."""
