"""The worker group: actors, admission, output, liveness, absent ranks."""
