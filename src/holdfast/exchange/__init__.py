"""Weights on their way out of a run, for other programs, and into a new run, from other programs."""
