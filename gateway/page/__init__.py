"""The page at /: what a browser is given, and what it is told each second. static/ is served as it lies there."""
