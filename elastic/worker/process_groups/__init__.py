"""Process groups of one generation over gloo or NCCL: rendezvous, collectives, abort."""
