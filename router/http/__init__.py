"""HTTP APIs of the router, in the router's process, over its dispatcher. They use no worker, protobuf or torch."""
