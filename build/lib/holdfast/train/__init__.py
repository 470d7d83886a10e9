"""The training process of a run: attaching to it, the training loop, and saving and restoring the state."""
