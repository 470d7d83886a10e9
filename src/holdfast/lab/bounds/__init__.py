"""Experiments on the theory's bounds."""
