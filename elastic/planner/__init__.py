"""Which layout on which nodes, how fast, how much memory, how many dollars. Sees numbers only."""
