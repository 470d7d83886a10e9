"""Loads the samples of each step."""
