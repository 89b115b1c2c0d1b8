"""What a step costs under a layout: seconds and bytes, one formula per function."""
