"""The objects that a run protects: how they are saved and restored."""
