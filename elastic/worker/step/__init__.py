"""One optimizer step of one rank: batch shares, microbatches, gradients of weights that stages or
ranks share, commit, block timing, checks of its results."""
