"""The experiment sharded-tradeoff: how many steps of training the loss of a shard costs."""
