"""Whether a run of the parameter server was right: every block, every round, every push, every loss, from its history."""
