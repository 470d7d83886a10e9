"""Advice for a run from its event files: what a failure costs, how often to save, and which recovery to choose."""
