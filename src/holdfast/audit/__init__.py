"""The audit of a run: checks from its event files that every sample was trained once, and restores were correct."""
