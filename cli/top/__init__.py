"""`baton top`: a router's workers and newest requests, live."""
