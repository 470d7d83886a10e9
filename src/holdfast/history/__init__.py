"""The history of a run: writing it, reading it, following it, and deciding which part of it counts."""
