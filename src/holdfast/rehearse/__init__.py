"""`holdfast rehearse`: runs a script with and without kills, and compares the states of these runs bit by bit."""
