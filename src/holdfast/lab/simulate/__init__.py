"""Simulated trials: training without failures, with failures, and many at once."""
