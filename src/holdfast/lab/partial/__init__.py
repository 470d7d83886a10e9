"""The experiments partial-recovery, priority-checkpoint and early-failures, and comparisons with your own model."""
