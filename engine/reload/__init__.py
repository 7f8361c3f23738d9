"""Exchange of the weights of a model in service: checks of the new ones, and steps with old and new together."""
