"""The samples that each rank trains in each step: how they are chosen, and their digests."""
