"""Access to the machine: bounded reading of files that others wrote, and the amount of memory."""
