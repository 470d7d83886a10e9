"""The audit of a run on the parameter server: a replay of the controller's history, and the checks that read it."""
