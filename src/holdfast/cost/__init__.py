"""The cost of a run, computed from its event files: the time that each cause, save and failure took."""
