"""The folder of a run: its configuration, lock, status and worker logs, and how to remove it."""
