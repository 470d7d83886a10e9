"""holdfast: training that survives failures, proves that it did, and measures what it cost."""
