"""A body to the message that it is, or to a problem that names its error."""
