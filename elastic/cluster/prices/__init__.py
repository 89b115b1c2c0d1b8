"""What nodes cost now."""
