"""The demo: a small network trained by four workers of which one is killed twice."""
