"""Readers of models' tool call formats, one module per format."""
