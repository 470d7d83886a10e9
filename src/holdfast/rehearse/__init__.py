"""The rehearsal of a script: run it with and without kills, and compare its state bit by bit."""
