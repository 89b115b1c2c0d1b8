"""Where the checks run: worker processes on this machine or on a cluster, and what a driver does
with them."""
