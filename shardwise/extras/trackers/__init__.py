"""Trackers of experiments, each through its own library. ``train/tracking.py`` calls them."""
