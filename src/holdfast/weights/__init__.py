"""Weights from elsewhere and for elsewhere: initial weights, loading a run's model, exporting it."""
