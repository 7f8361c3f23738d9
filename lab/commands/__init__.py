"""Subcommands of `baton` that come with the lab: bench, chaos, simulate, size and test."""
