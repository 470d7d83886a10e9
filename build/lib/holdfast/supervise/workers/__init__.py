"""The worker processes of one node: starting, watching and ending them."""
