"""Peer replicas and checkpoints: how often, where, which are kept, and which one a recovery begins
from."""
