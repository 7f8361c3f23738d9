"""Stack on hosts that are network namespaces of this machine, and faults of such hosts and their links."""
