"""The cost of a run, computed from its history: every second of wall clock by cause, every save and every failure."""
