"""Transfer of KV blocks between processes: the destination pulls, and a process writes only its own memory.

This package works on tensors and block ids. It does not depend on the engine, protobuf or servers.
"""
