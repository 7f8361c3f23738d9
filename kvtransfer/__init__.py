"""Moves blocks of KV between processes: the destination pulls, nobody writes memory of another process.

Takes tensors and block ids. Knows no engine, no protobuf and no server.
"""
