"""The record of each request: its times, its end, its trace, its explanation."""
