"""What the driver knows: the State, and how each event and each order changes it."""
