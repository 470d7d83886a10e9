"""Observation of a script's state in each step, for `holdfast rehearse`."""
