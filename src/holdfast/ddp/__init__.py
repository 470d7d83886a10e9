"""Training in real worker processes that average their gradients: the run as a script sees it, and exact recovery."""
