"""Proves from its history that a run trained every sample once, restored what was committed, and declared every loss."""
