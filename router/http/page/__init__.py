"""The web page at /: its files, and the state of the router, which browsers read every second."""
