"""`baton bench`: measurements that need no server. What is compared is measured in one run, limits included."""
