"""Decides which samples each step and rank trains, and digests them."""
