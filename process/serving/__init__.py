"""Life of a process: bind, start, serve, drain, stop."""
