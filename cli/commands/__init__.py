"""Flags of the commands, grouped by purpose. The code of a command is imported only when it is called."""
