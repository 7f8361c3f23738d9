"""Blocks of KV: which are free, held or cached, whose they are, how they lie, and how many fit."""
