"""A whole service on one machine: which processes it has, started, watched and ended."""
