"""The experiment backprop-tradeoff: workers are lost during backward, and replay, forward or skip recovers."""
