"""Transfer of KV blocks between processes: the destination pulls, and a process writes only its own memory.

Works on tensors and block ids; independent of engine, protobuf and servers.
"""
