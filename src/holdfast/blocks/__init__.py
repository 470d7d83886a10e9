"""State divided into blocks: which blocks to save and which to restore."""
