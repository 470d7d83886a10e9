"""The experiment sharded-tradeoff: what a lost shard costs."""
