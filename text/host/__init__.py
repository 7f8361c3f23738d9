"""Access to the machine: files written by others, and memory."""
