"""Where the time and the money went: the journal of a run and its accounts."""
