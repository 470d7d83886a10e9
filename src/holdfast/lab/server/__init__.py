"""The experiment server-overhead: a topic model on the parameter server, half of whose nodes are killed."""
