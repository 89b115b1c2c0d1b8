"""Ray, nodes and clouds: all that a run needs of a cluster. The only package that imports ray."""
