"""What a step trains on: which sample ids in which order, where they are read from, packing,
mixing, and the loader."""
