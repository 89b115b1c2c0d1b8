"""What `elastic plan` and `elastic prices` print."""
