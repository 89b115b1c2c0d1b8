"""What is measured: a sample's cost, this machine's speeds, whether a node may join."""
