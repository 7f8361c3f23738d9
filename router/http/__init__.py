"""OpenAI's HTTP API over the router's own dispatcher, in its process. Knows no worker, no protobuf, no torch."""
