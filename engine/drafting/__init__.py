"""Draft model: a small model that drafts answers of a larger one."""
