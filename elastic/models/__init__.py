"""Reference models: plain modules that any layout can cut."""
