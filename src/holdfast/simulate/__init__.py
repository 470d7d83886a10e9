"""Many trials in one process."""
