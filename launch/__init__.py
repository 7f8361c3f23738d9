"""A complete service on one machine: its processes are planned, started, supervised and stopped."""


class CommandFailed(Exception):
    """Error that ends a command with exit code 1; its message goes to stderr and names the remedy."""
