"""Checks that answers are bit-identical however they are computed."""
