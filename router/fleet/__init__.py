"""Links to the workers, and the exchange with the other routers."""
