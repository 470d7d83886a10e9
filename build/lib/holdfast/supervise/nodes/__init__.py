"""Several nodes of one run: rendezvous, quorum and lost nodes."""
