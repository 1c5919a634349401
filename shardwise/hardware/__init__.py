"""Clusters and devices: published peaks, topology, and this machine."""
