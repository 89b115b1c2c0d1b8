"""The worker process itself: environment, allocators, CUDA streams, GPU health, injected faults,
what it is doing."""
