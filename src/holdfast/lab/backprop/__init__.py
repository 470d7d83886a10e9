"""The experiment backprop-tradeoff: after a loss of workers during backward, repeat, complete or skip the mini-batch."""
