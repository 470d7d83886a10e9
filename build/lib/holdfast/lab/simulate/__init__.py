"""Simulated failures: train a model, inject failures into its run, and count the iterations they cost."""
