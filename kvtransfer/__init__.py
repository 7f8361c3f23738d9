"""Moves blocks of KV between processes: the destination pulls, and a process writes only its own memory.

Takes tensors and block ids. Knows no engine, no protobuf and no server.
"""
