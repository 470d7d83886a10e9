"""Failures on purpose: schedules of failures, the points of a step where they happen, and a checkpoint store that fails."""
