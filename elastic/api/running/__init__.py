"""A run from its start to its report: checks, the driver, scripts, supervision."""
