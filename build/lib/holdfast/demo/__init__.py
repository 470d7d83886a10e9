"""The demo: four workers train a small network, and one worker is killed twice."""
