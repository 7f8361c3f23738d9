"""KV over TCP connections of its own, between the host memories of any two workers.

The reader asks for blocks, and their bytes go from the one pool into the other without a copy in between. A pair has as
many connections as make it faster.
"""
