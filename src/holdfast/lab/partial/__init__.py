"""The experiments partial-recovery, priority-checkpoint and early-failures, and comparisons of strategies on your own model."""
