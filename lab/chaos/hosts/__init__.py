"""The stack on hosts that share nothing, and the faults of hosts and of their links."""
