"""Weights that enter or leave a run: initialise a model, load the states of a run, and export them."""
