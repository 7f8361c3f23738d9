"""The `baton` command: start a service on one machine, send requests to it, inspect it."""
