"""The history of a run: writing, reading and following it, gathering it from nodes, and finding the steps that no restart undid."""
