"""Where the time and the money of a run went, by its journal: accounts, transitions, launches."""
