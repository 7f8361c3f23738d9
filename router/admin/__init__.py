"""Admin gRPC service of the router."""
