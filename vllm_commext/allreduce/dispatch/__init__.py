"""Which backend serves a message: the policy, the dispatcher of a group, and how it is created."""
