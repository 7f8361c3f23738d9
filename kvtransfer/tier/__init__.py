"""KV blocks in files, which survive eviction from the pool, `kill -9` of the worker, and its restart.

A directory has one folder per worker, which only that worker writes; all workers of the directory read all folders.
"""
