"""Schedules of pipeline parallelism, and the messages between its ranks, as data."""
