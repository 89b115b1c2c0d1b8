"""What nodes cost now: spot and list prices asked of AWS, told to the driver as events."""
