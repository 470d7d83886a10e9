"""The experiment server-overhead: a topic model on the parameter server, where half of the server nodes are killed."""
