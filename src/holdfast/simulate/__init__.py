"""Simulated training: many runs with one failure each, all in one process or in several."""
