"""Replay of a bundle's record: placements and steps by the real code, times to first token by simulation."""
