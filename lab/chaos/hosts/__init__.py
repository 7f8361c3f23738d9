"""Stack on hosts in network namespaces, and faults of hosts and links."""
