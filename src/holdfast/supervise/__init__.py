"""The parent of the workers: starts them, watches them, and starts them again."""
