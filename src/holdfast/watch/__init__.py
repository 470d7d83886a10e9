"""Follow a run while it trains: in the terminal, in a browser, and as Prometheus metrics."""
