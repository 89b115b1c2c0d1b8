"""Cluster files: what `ray up` launches (or KubeRay runs), read for its pools; `elastic cluster
check` says what is wrong.

A worker node type is a pool: its name is the pool's, since Ray labels the nodes of a type
`ray.io/node-group`. What a type is bought as stands in its label `ray.io/market-type`, its GPUs,
memory and price come from the catalog, and what neither says (the price of owned nodes, the end of
a reservation) from the file's own section `metadata: {elastic: ...}`, which Ray ignores.
"""

from elastic.config.clusters.cluster_file import ClusterNodeType, ClusterSpec, Problem
from elastic.config.clusters.load_cluster import load_cluster, read_cluster
from elastic.config.clusters.rules import problems_of

__all__ = [
    "ClusterSpec",
    "ClusterNodeType",
    "Problem",
    "load_cluster",
    "problems_of",
    "read_cluster",
]
