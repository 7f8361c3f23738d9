"""Files of spans."""
