"""What certify tries: layouts, faults, moves, speed, storage, the main path, the ways in."""
