"""The record of a run: its folder, the journal, and the lease of its one driver."""
