"""Failures that lose a part of the state: partial-recovery, priority-checkpoint, early-failures, and your own model."""
