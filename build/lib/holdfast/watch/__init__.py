"""The live view of a run while it trains: in the terminal, in a browser, and as Prometheus metrics."""
