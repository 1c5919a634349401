"""Leaves: packages that few users need. ``core/plugins.py`` lists what each adds; the core imports none of them.

Each can be removed with its tests, and the core plans, trains, verifies, resumes and exports as before.
"""
