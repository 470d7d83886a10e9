"""Communication among the ranks of a run: memberships, process groups that survive the loss of a member, and links."""
