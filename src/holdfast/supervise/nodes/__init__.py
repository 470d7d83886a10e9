"""The nodes of one run: how their supervisors meet, how many nodes must take part, and how a lost node is noticed."""
