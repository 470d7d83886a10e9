"""Weights that enter or leave a run: initial weights, loading a run's states, and exporting them."""
