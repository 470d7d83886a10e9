"""Advice from the event files of a run: the cost of a failure, the best save interval, and the best recovery."""
