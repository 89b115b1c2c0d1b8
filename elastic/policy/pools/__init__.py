"""How many nodes of which pool: allocation, requests, release, drain, deadline and budget;
how long spot is waited for."""
