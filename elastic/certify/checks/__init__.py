"""What certify tries: layouts, faults, moves, speed, storage, the scenarios, the ways in;
every_check.py has the list."""
