"""`holdfast compare`: the saved states of two runs, compared bit by bit."""
