"""The experiment recovery-matrix: real training runs with the same failures under several recovery methods."""
