"""Processes of the last release and of this tree in one service."""
