"""Definitions of models as plain tensors and functions over paged KV."""
