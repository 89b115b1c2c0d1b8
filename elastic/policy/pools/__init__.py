"""How many nodes of which pool: allocation, requests, release, drain, deadline and budget."""
