"""A small model that drafts the answers of a larger one: its blocks, its passes, and how it is loaded."""
