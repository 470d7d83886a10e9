"""Failures that take some blocks of the state: partial-recovery, priority-checkpoint, early-failures, and your own model."""
