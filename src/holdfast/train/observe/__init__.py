"""Records what a script holds in each step, for `holdfast rehearse`."""
