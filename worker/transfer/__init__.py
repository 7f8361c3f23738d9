"""KV transfers between workers: the part that uses protobuf, of which `kvtransfer/` is independent."""
