"""What is promised of a run, as scenarios with one judge, for certify and the end-to-end tests."""
