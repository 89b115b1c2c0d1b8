"""Spot markets on the virtual clock: traces, baselines, the best that could be done, and runs."""
