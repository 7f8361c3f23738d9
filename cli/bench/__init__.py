"""`baton bench`: measurements that need no server. Compared figures are measured in one run, limits included."""
