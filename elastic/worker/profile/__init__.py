"""What is measured: a sample's cost, this machine's speeds and load, whether a node may join."""
