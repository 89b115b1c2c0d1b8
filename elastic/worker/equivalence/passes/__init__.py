"""What passes of one process keep for later ones, and what they see of samples together."""
