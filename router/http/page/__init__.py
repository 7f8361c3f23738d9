"""The page at /: its files, and the state that a browser reads every second."""
