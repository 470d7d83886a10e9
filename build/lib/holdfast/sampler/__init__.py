"""The choice of samples for each step and rank, and digests of them."""
