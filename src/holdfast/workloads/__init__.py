"""What we train, and its data."""
