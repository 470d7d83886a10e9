"""The experiment backprop-tradeoff: workers are lost during backward; repeat, complete or skip the mini-batch."""
