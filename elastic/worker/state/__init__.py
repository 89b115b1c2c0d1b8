"""The training state of one rank as boxes: in GPU memory, in host copies, as peer replicas, and on
its way."""
