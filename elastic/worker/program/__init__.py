"""A Program made concrete: how it is called, what it holds, how it is optimized, what a step
commits."""
