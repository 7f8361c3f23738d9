"""Public gRPC service of the router, and rules that it shares with the HTTP API."""
