"""Cost of a run, computed from its event files: the wall clock by cause, and the cost of each save and failure."""
