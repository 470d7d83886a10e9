"""Was it right: verdicts computed from a history alone."""
