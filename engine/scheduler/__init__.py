"""Choice of the tokens that the next step computes. Pure: no clock, no torch."""
