"""Does this very script resume exactly? It is run unkilled and killed, and everything it holds is compared."""
