"""`baton timeline`: steps, transfers and requests of all processes as one file that Perfetto opens."""
