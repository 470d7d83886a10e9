"""A deterministic simulation of a cluster: the product's own code on a simulated clock, scheduler, store and network."""
