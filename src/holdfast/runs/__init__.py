"""Runs as folders: which there are, how each stands, what its workers printed, and how to be rid of it."""
