"""Simulated network: gRPC over links in virtual time."""
