"""The code of a training process: joining the run (`hf.attach`), the training loop, saving and restoring the state."""
