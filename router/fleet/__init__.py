"""The sessions with workers, and the other routers."""
