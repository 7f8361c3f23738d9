"""Replacement of a model's weights while it serves requests: checks of the new weights, steps with both old and new."""
