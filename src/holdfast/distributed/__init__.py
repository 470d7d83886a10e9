"""The ranks of a run among each other: who they are, process groups that outlive a member, and the links below them."""
