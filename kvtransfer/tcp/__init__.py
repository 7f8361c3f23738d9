"""KV copies over dedicated TCP connections between the host memories of any two workers.

The reader requests blocks, whose bytes go from one pool into the other without intermediate copies. A pair opens as
many connections as increase its speed.
"""
