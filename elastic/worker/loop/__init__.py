"""`elastic.loop`: the user's script in control, the session behind it."""
