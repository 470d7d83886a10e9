"""From a history to a decision: what a failure will cost, how often to save, and which recovery to choose."""
