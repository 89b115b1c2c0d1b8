"""Built-in programs: what certify trains."""
