"""Ray's private names, addresses, and processes of this machine."""
