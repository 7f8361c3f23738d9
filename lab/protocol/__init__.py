"""Specification of the hand-over and of attempts, explored exhaustively and checked against the simulation."""
