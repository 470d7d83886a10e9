"""Loading of the samples of each step."""
