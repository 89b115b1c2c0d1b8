"""What `elastic init` writes: jobs and cluster files that work as they are, to be edited."""
