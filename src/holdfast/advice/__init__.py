"""Advice from the history of a run: the cost of a failure, the best save interval, and the recovery to choose."""
