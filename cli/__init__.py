"""The `baton` command: starts a whole service on one machine, talks to it, looks at it."""
