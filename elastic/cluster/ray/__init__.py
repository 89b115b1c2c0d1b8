"""The lowest layer of cluster: Ray's private names, its address, processes of this machine, threads
that survive errors."""
