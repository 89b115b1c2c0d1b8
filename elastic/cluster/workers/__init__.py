"""The worker group: one Ray actor per GPU process, who is admitted, what they print, which of them
is silent."""
