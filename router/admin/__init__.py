"""Admin gRPC service."""
