"""ray.train's types in and out, and the session of scripts that are restarted."""
