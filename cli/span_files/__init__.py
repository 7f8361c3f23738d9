"""Files of spans: where a run writes them, and which forms are read."""
