"""The same fold, decide and driver loop on a virtual clock."""
