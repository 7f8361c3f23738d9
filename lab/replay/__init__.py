"""Replay of a bundle's record: placements, steps and tokens by the real code, times to first token by simulation."""
