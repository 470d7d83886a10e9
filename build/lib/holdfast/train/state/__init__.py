"""The protected state of a training process: its objects, saving them and restoring them."""
