"""The experiment backprop-tradeoff: workers lost inside back-propagation, under replay, forward and skip."""
