"""The audit of a run on the parameter server: replays the recorded events, and checks that they agree."""
