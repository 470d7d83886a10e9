"""What surviving failures costs in time."""
