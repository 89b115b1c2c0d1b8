"""What to do now: `fold` turns events into a State, `decide` turns the State into a Decision.
Pure."""
