"""Simulated trials of partial-recovery and its relatives: runs without failures, failures in them, many at once."""
