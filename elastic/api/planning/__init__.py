"""plan: which layout on which nodes, how long, how many dollars."""
