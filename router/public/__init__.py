"""Public gRPC service."""
