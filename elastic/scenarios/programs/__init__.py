"""Built-in programs: what scenarios and certify train."""
