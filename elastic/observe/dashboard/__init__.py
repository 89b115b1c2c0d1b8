"""Runs in a browser: a small read-only server that follows journals, and its page."""
