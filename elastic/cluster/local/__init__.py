"""The embedded cluster: several real Ray nodes on this machine, gone with the driver."""
