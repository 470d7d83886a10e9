"""Live recovery of sharded models (FSDP2): a lost shard comes back from the neighbour that keeps a copy of it."""
