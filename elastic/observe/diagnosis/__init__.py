"""What is wrong, or could be better: of this machine before a run, of a run by its journal."""
