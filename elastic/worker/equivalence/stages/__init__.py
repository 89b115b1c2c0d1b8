"""What pipeline stages of several groups of blocks hand on, found before the start."""
