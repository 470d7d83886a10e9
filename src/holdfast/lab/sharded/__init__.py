"""The experiment sharded-tradeoff: what a lost shard of a sharded model costs, by what comes back."""
