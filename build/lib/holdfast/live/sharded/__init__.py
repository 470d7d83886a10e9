"""Live recovery of sharded models (FSDP2): the next rank keeps a copy of every shard."""
