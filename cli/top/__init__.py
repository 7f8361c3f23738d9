"""Live view of a router's workers and newest requests (`baton top`)."""
