"""Sizing of clusters: candidate clusters are simulated with measured step costs."""
