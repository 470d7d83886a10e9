"""Which samples each rank trains in each step, and digests of the samples."""
