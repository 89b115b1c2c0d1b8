"""Where nodes come from: providers, the autoscaler, demand, leaked instances."""
