"""Checks of this machine: devices, links, memory, and their measured speed."""
