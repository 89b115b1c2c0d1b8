"""Inside one GPU process: torch, no ray; no policy, but for ranks that drive themselves."""
