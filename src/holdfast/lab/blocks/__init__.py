"""Experiments on partial recovery and priority checkpoints."""
