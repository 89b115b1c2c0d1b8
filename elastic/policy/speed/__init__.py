"""Measured speeds of workers, and batch shares and layouts that follow them."""
