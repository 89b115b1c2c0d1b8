"""What a person says of numbers: how those of a step may be called, and where they go."""
