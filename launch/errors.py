"""The error that ends a command with a message on stderr and exit code 1, instead of a traceback."""


class CommandFailed(Exception):
    """The message is for people and names the remedy."""
