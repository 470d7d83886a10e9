"""Communication among the ranks of a run: membership, connections, and process groups that survive a lost worker."""
