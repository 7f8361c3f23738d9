"""Which tokens the next step computes. Pure: no clock, no torch."""
