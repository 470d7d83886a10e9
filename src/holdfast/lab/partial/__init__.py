"""Experiments in which a failure takes some blocks of the state: partial-recovery, priority-checkpoint and early-failures, for our panels or a model of your own."""
