"""How models write calls of functions: one file for each format, and which of them a model has."""
