"""ray.train's types in and out, and scripts that Ray Train restarts."""
