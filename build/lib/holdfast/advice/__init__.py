"""Advice from the event files of a run: the cost of a failure, and the best save interval and recovery strategy."""
