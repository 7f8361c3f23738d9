"""The page at /: its files, and the state that a browser reads each second. static/ is served as it is."""
