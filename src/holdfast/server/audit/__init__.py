"""The audit of a run on the parameter server."""
