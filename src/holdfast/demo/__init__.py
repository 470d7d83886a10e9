"""The demo: a small network, trained by four workers, one of which is killed twice."""
