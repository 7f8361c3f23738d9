"""One device's model and its pages. Knows no network, no other process and no protobuf."""
