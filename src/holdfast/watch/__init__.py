"""Looking at a run while it goes on: in the terminal, in a browser, and as numbers for Prometheus."""
