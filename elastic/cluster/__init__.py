"""The Backend on Ray: the only package that imports ray."""
