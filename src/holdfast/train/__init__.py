"""A training process: attaching to a run, the loop a script iterates, and what is saved and restored around it."""
