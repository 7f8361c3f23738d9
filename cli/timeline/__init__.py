"""Steps, transfers and requests of all processes as a file for Perfetto (`baton timeline`)."""
