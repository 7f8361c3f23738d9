"""The life of a process: bind, start, serve, drain, stop."""
