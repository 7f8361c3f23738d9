"""KV blocks in files, which survive eviction from the pool, `kill -9` of the worker, and its restart.

The directory has one folder per worker, to which only that worker writes. All workers that share the directory read all
of its folders.
"""
