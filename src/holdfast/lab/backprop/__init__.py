"""The experiment backprop-tradeoff: what it costs to repeat, complete or skip a mini-batch in which workers are lost."""
