"""Faults on real processes under load, and a checker of what every client saw. Knows no protobuf and no scheduler."""
