"""Rolling upgrade between the last release and this tree."""
