"""Dashboards and alerts, generated from the metrics that a router declares."""
