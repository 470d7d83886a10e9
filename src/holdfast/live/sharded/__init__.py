"""Live recovery of sharded models (FSDP2): a lost shard comes back from a copy, or with older values."""
