"""Blocks of KV in files: they outlive their eviction from the pool, `kill -9` of the worker, and its restart.

A directory has a folder for each worker, which alone writes there; all workers of the directory read all folders.
"""
