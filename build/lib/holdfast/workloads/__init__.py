"""Training workloads for the simulator and the parameter server, their data sets, and the interface for your own."""
