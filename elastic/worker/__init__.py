"""Inside one GPU process: torch, no ray, no policy."""
