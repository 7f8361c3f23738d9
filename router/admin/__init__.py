"""The operator's gRPC service."""
