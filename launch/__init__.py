"""A whole service on one machine: which processes it has, started, watched and ended."""


class CommandFailed(Exception):
    """Ends a command with its message on stderr and exit code 1: for people, with the remedy."""
