"""What a person sees of a run. Reads the journal, never touches the run."""
