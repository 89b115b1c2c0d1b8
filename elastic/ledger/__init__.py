"""The record of a run: its folder, the journal, the lease of its one driver, and the accounts of
time and money."""
