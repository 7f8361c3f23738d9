"""gRPC over simulated links, in virtual time."""
