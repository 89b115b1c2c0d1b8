"""What profiles of live runs say: read from a run's storage, shown as tables, bars and pictures."""
