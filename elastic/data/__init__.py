"""What a step trains on: sample order, sources, and the loader."""
