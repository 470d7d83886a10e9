"""Experiments on the parameter server."""
