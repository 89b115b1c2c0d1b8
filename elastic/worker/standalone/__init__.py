"""Ranks that torchrun has started: a driver among them, on a Backend of processes, no Ray."""
