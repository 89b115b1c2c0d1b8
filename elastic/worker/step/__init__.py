"""One optimizer step of one rank: batch shares, microbatches, commit, block timing, checks of its
results."""
