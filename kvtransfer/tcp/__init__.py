"""KV copies over dedicated TCP connections between the host memories of any two workers.

The reader requests blocks, whose bytes go from one pool into the other without intermediate copies. A pair of workers
opens further connections as long as they make transfers faster.
"""
