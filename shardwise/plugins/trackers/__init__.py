"""Trackers of experiments, each through its own library. ``trainer/tracking.py`` calls them."""
