"""The audit of a run on the parameter server: replays the recorded events, and checks them against each other."""
