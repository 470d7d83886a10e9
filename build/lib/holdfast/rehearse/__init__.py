"""The rehearsal of a script: runs it with and without kills, and compares its state bit by bit."""
