"""Pipeline stages of programs with several groups of blocks."""
