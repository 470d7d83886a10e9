"""Trainers that own their loop, protected by one call each: `transformers` and `lightning`."""
