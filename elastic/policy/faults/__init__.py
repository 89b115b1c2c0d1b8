"""What failed, and what follows: nodes, devices, corrupted numbers, refused layouts, retries."""
