"""Failures on purpose: the schedule, the points of a step where they strike, and storage that fails."""
