"""Which bytes go from whom to whom when the layout changes: integers only."""
