"""What one GPU shows by itself: a rank alone on it, in a process of its own."""
