"""The protected state of a training process: what it consists of, saving it, restoring it."""
