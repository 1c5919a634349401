"""The training loop, its metrics, and its recovery from faults."""
