"""Observation of a script's state in each step, for `holdfast rehearse`, a test run with planned kills."""
