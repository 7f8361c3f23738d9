"""Simulation of role changes and autoscaling: how a cluster follows its load, while workers start, drain and die."""
