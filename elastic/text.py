"""Amounts and names in the words of a message."""

from __future__ import annotations


def n_of(n: int, noun: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{n} {noun}" + ("" if n == 1 else "s")
