"""The weights of a model: initialise them before a run, load them from a run, and export them."""
